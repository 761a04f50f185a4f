// The loops that touch the row, written for the vectoriser: no branches, one block at a time in the
// scores' own type, totals in double. q = exp(-|z|)/2 everywhere.
#pragma once

#include <cstring>

#include "solver.hpp"

#if defined(__GNUC__) || defined(__clang__)
#define LAPRUNE_INLINE inline __attribute__((always_inline))
#else
#define LAPRUNE_INLINE __forceinline
#endif

// One compiled copy per instruction set, chosen when the library is loaded.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define LAPRUNE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define LAPRUNE_LANES 16
#else
#define LAPRUNE_CLONES
#if defined(__AVX512F__)
#define LAPRUNE_LANES 16
#elif defined(__AVX__)
#define LAPRUNE_LANES 8
#else
#define LAPRUNE_LANES 4
#endif
#endif

namespace laprune {

// Scores summed in their own type before they join a double: 16 for each lane of a vector of floats,
// more than which would add up the rounding of equal terms.
constexpr int64_t kBlock = 16 * LAPRUNE_LANES;

template <typename To, typename From>
LAPRUNE_INLINE To bits(From x) {
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

// exp(-(w + low)) for 0 <= w <= max_z and a tiny low. The polynomials are Chebyshev fits of exp on
// [-ln2/2, ln2/2] (errors 2e-9 and 3e-18); 2^n enters through the exponent bits.
LAPRUNE_INLINE float exp_minus(float w, float low) {
  const float magic = 12582912.0f;
  const float shifted = magic - w * 1.44269504088896341f;
  const float n = shifted - magic;
  const float f = ((-w - n * 0.693359375f) - n * -2.12194440e-4f) - low;
  float p = 0.0013941118895837f;
  p = p * f + 0.0083751347746243f;
  p = p * f + 0.0416663527711122f;
  p = p * f + 0.1666641541404118f;
  p = p * f + 0.5000000047146057f;
  p = p * f + 1.0000000377388713f;
  p = p * f + 1.0f;
  return bits<float>(bits<uint32_t>(p) + (bits<uint32_t>(shifted) << 23));
}

LAPRUNE_INLINE double exp_minus(double w, double low) {
  const double magic = 6755399441055744.0;
  const double shifted = magic - w * 1.4426950408889634074;
  const double n = shifted - magic;
  const double f = ((-w - n * 6.93147180369123816490e-1) - n * 1.90821492927058770002e-10) - low;
  double p = 2.5110049204818659793e-8;
  p = p * f + 2.763265472252779189e-7;
  p = p * f + 2.7557240887229868596e-6;
  p = p * f + 2.4801485441561312966e-5;
  p = p * f + 1.9841269890076402829e-4;
  p = p * f + 1.3888888952352862866e-3;
  p = p * f + 8.3333333333195896163e-3;
  p = p * f + 4.166666666648795252e-2;
  p = p * f + 1.666666666666668082e-1;
  p = p * f + 5.0000000000000184039e-1;
  p = p * f + 9.9999999999999999976e-1;
  p = p * f + 9.9999999999999999693e-1;
  return bits<double>(bits<uint64_t>(p) + (bits<uint64_t>(shifted) << 52));
}

template <typename T>
constexpr T max_z();
template <>
constexpr float max_z<float>() { return 80.0f; }
template <>
constexpr double max_z<double>() { return 700.0; }

// z = (r - pivot) / t - c_hi - c_lo: two pieces, so that float keeps the digits of b/t. The second is
// left to the exponential: added to z it would be rounded away, alike for all equal scores.
template <typename T>
struct Affine {
  T pivot, inv_t, c_hi, c_lo;

  Affine(double pivot_, double b, double t, double centre = 0)
      : pivot(static_cast<T>(pivot_)),
        inv_t(static_cast<T>(std::min(1 / t, static_cast<double>(std::numeric_limits<T>::max())))) {
    const double rest = pivot_ - static_cast<double>(pivot);  // 0 where the pivot is a score
    const double c = (b + rest) * static_cast<double>(inv_t) + centre;
    c_hi = static_cast<T>(c);
    const double lost = c - static_cast<double>(c_hi);
    c_lo = static_cast<T>(std::abs(lost) < 0.5 ? lost : 0);  // larger: every score is saturated
  }
  LAPRUNE_INLINE T operator()(T r) const { return (r - pivot) * inv_t - c_hi; }
};

// A score further away, in units of t, has no gradient: q times a small gradient would be subnormal,
// slow here and in all that follows.
template <typename T>
constexpr T reach() { return T(0.75) * max_z<T>(); }

// exp(-|z|)/2 with |z| cut at max_z; 0 for scores that are not eligible. Conditions are said one by one
// and results chosen by arithmetic where that will do: compilers make a tangle of nested ones.
template <typename T>
LAPRUNE_INLINE T half_exp(T z, T w, T c_lo, T eligible) {
  return (T(0.5) * eligible) * exp_minus(w, z > T(0) ? -c_lo : c_lo);
}

template <typename T>
LAPRUNE_INLINE T size(T z) {
  const T w = std::abs(z);
  return w < max_z<T>() ? w : max_z<T>();
}

// One pass: the sums of the solver; writes the mask, or mask * values, when `out` is given. kAll: also
// what only some rows need.
template <typename T, bool kAll, bool kWrite, bool kGate>
LAPRUNE_INLINE Sums pass_loop(const T* r, int64_t n, const Point& at, const T* values, T* out) {
  const Affine<T> z_of(at.pivot, at.b, at.t);
  const T a = static_cast<T>(at.a), rest = static_cast<T>(1 - at.a);
  const T inf = std::numeric_limits<T>::infinity();
  Sums total;
  total.all = kAll;
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t stop = std::min(n, start + kBlock);
    T N = 0, q_lo = 0, q_hi = 0, qw_lo = 0, qw_hi = 0, qq_lo = 0, qq_hi = 0, qqw = 0;
    T count = 0, bad = 0, spread = 0, below = -inf, above = inf, gap = inf;
#pragma omp simd reduction(+ : N, q_lo, q_hi, qw_lo, qw_hi, qq_lo, qq_hi, qqw) \
    reduction(+ : count, bad, spread) reduction(max : below) reduction(min : above, gap)
    for (int64_t i = start; i < stop; ++i) {
      const T x = r[i];
      const T z = z_of(x);
      const bool ok = x > -inf, hi = z > T(0);
      const T one = ok ? T(1) : T(0), w = size(z), q = half_exp(z, w, z_of.c_lo, one);
      N += hi ? T(1) : T(0);
      const T hi_q = hi ? q : T(0), lo_q = q - hi_q;
      // Squares that would be subnormal are nothing beside q, and slow.
      const T factor = w < max_z<T>() / 2 ? q : T(0);
      q_lo += lo_q, q_hi += hi_q;
      qw_lo += lo_q * w, qw_hi += hi_q * w;
      qq_lo += lo_q * factor, qq_hi += hi_q * factor;
      qqw += q * (factor * w);
      if (kAll) {
        const T d = ok ? (hi ? rest - q : q - a) : T(0);  // p - a, without rounding 1 - q
        const T far = std::abs(x - z_of.pivot);
        count += one;
        bad += x < inf ? T(0) : T(1);
        spread += d * d;
        const T under = ok && !hi ? x : -inf, over = hi ? x : inf, other = far > T(0) ? far : inf;
        below = under > below ? under : below;
        above = over < above ? over : above;
        gap = other < gap ? other : gap;
      }
      if (kWrite) {
        const T p = hi ? T(1) - q : q;
        const T mask = w < max_z<T>() ? p : (hi ? T(1) : T(0));  // beyond max_z there is nothing
        out[i] = kGate ? (mask == T(0) ? T(0) : mask * values[i]) : mask;
      }
    }
    total.add({N, q_lo, q_hi, qw_lo, qw_hi, qq_lo, qq_hi, qqw, kAll, count, bad, spread, below, above, gap});
  }
  return total;
}

// First look at a row, to start from: eligible count, NaN or +inf, extremes, and the sum of scores.
struct Stats {
  double count = 0, bad = 0, low = kInf, high = -kInf, sum = 0;
  void add(const Stats& o) {
    count += o.count, bad += o.bad, sum += o.sum;
    low = std::min(low, o.low), high = std::max(high, o.high);
  }
};

// kFinite: the sum is finite only if all scores are, as they nearly always are.
template <typename T, bool kFinite>
LAPRUNE_INLINE Stats stats_block(const T* r, int64_t n) {
  const T inf = std::numeric_limits<T>::infinity(), share = T(0.5) / kBlock;  // no sum overflows
  T count = 0, bad = 0, low = inf, high = -inf, sum = 0;
#pragma omp simd reduction(+ : count, bad, sum) reduction(min : low) reduction(max : high)
  for (int64_t i = 0; i < n; ++i) {
    const T x = r[i], up = kFinite || x > -inf ? x : inf;
    low = low < up ? low : up;
    high = high > x ? high : x;
    if (kFinite) {
      sum += x * share;
    } else {
      count += x > -inf ? T(1) : T(0);
      bad += x < inf ? T(0) : T(1);
      sum += x > -inf && x < inf ? x * share : T(0);
    }
  }
  if (kFinite) count = static_cast<T>(n);
  return {count, bad, low, high, sum / static_cast<double>(share)};
}

template <typename T>
LAPRUNE_INLINE Stats stats_loop(const T* r, int64_t n) {
  Stats total;
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t size = std::min(n - start, kBlock);
    Stats found = stats_block<T, true>(r + start, size);
    if (!std::isfinite(found.sum)) found = stats_block<T, false>(r + start, size);
    total.add(found);
  }
  return total;
}

// How many scores are above a cut.
template <typename T>
LAPRUNE_INLINE double count_loop(const T* r, int64_t n, T cut) {
  double total = 0;
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t stop = std::min(n, start + kBlock);
    T count = 0;
#pragma omp simd reduction(+ : count)
    for (int64_t i = start; i < stop; ++i) count += r[i] > cut ? T(1) : T(0);
    total += count;
  }
  return total;
}

// Copies the scores x with low < x <= high; `out` has room for one more.
template <typename T>
LAPRUNE_INLINE void gather_loop(const T* r, int64_t n, T low, T high, T* out) {
  constexpr int64_t kFew = 8;
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t size = std::min(n - start, kBlock);
    uint8_t within[kBlock] = {};
    for (int64_t i = 0; i < size; ++i) within[i] = (r[start + i] > low) & (r[start + i] <= high);
    for (int64_t i = 0; i < size; i += kFew) {
      uint64_t any;
      std::memcpy(&any, within + i, sizeof any);
      if (any == 0) continue;
      for (int64_t j = i; j < std::min(i + kFew, size); ++j) *out = r[start + j], out += within[j];
    }
  }
}

// What the gradient needs of a row, centred on (mean_z, mean_p); e is the upstream gradient of p.
struct GradSums {
  double count = 0, s0 = 0, s1 = 0, u0 = 0, cov = 0, g0 = 0, g1 = 0;
  void add(const GradSums& o) {
    count += o.count, s0 += o.s0, s1 += o.s1, u0 += o.u0, cov += o.cov, g0 += o.g0, g1 += o.g1;
  }
};

struct GradPoint {
  double pivot, b, t, mean_z, mean_p;
  double c0, c1;  // dr = q/t (e - c0 - c1 p)
};

template <typename T, bool kGate>
LAPRUNE_INLINE GradSums grad_sums_loop(const T* r, const T* values, const T* g, int64_t n,
                                       const GradPoint& at) {
  const Affine<T> z_of(at.pivot, at.b, at.t), y_of(at.pivot, at.b, at.t, at.mean_z);
  const T mean_p = static_cast<T>(at.mean_p), over = static_cast<T>(1 - at.mean_p);
  const T inf = std::numeric_limits<T>::infinity();
  const T top = static_cast<T>(max_z<T>() - at.mean_z), bottom = static_cast<T>(-max_z<T>() - at.mean_z);
  GradSums total;
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t stop = std::min(n, start + kBlock);
    T count = 0, s0 = 0, s1 = 0, u0 = 0, cov = 0, g0 = 0, g1 = 0;
#pragma omp simd reduction(+ : count, s0, s1, u0, cov, g0, g1)
    for (int64_t i = start; i < stop; ++i) {
      const T x = r[i], z = z_of(x), one = x > -inf ? T(1) : T(0);
      const T q = half_exp(z, size(z), z_of.c_lo, one);
      const T v = z > T(0) ? over - q : q - mean_p;  // p - mean_p, without rounding 1 - q
      // z - mean_z, cut as z is: beyond that q is next to nothing, but a score may be 1e38.
      const T off = y_of(x) - y_of.c_lo, up = off < top ? off : top, y = up > bottom ? up : bottom;
      const T qy = q * y;
      const T upstream = kGate ? g[i] * values[i] : g[i];
      const T e = std::abs(z) < reach<T>() ? upstream : T(0);
      count += one;
      s0 += q, s1 += qy, u0 += q * v, cov += qy * v, g0 += q * e, g1 += qy * e;
    }
    total.add({count, s0, s1, u0, cov, g0, g1});
  }
  return total;
}

// dr, and dvalues = g p when gated; a row that gates itself (kSelf) has both in dr.
template <typename T, bool kGate, bool kSelf>
LAPRUNE_INLINE void grad_write_loop(const T* r, const T* values, const T* g, int64_t n,
                                    const GradPoint& at, T* dr, T* dvalues) {
  const Affine<T> z_of(at.pivot, at.b, at.t);
  const T c1 = static_cast<T>(at.c1), mean_e = static_cast<T>(at.c0 + at.c1 * at.mean_p);
  const T mean_p = static_cast<T>(at.mean_p), over = static_cast<T>(1 - at.mean_p);
  const T inv_t = z_of.inv_t;
  const T inf = std::numeric_limits<T>::infinity();
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const T x = r[i], z = z_of(x), near = std::abs(z) < reach<T>() ? T(1) : T(0);
    const T q = half_exp(z, size(z), z_of.c_lo, near);
    const T v = z > T(0) ? over - q : q - mean_p;
    const T upstream = kGate ? g[i] * values[i] : g[i];
    const T e = x > -inf ? upstream : T(0);
    const T d = (q * inv_t) * ((e - mean_e) - c1 * v);
    const T direct = kGate && x > -inf ? g[i] * (z > T(0) ? T(1) - q : q) : T(0);
    dr[i] = kSelf ? d + direct : d;
    if (kGate && !kSelf) dvalues[i] = direct;
  }
}

// The loops as plain functions, so that each is compiled once per instruction set.
template <typename T>
struct Kernels;

#define LAPRUNE_PASSES(T, name, all)                                                                \
  LAPRUNE_CLONES static Sums pass_##name(const T* r, int64_t n, const Point& at) {                  \
    return pass_loop<T, all, false, false>(r, n, at, nullptr, nullptr);                             \
  }                                                                                                 \
  LAPRUNE_CLONES static Sums write_##name(const T* r, int64_t n, const Point& at, T* out) {         \
    return pass_loop<T, all, true, false>(r, n, at, nullptr, out);                                  \
  }                                                                                                 \
  LAPRUNE_CLONES static Sums gate_##name(const T* r, int64_t n, const Point& at, const T* v,        \
                                         T* out) {                                                  \
    return pass_loop<T, all, true, true>(r, n, at, v, out);                                         \
  }

#define LAPRUNE_KERNELS(T, name)                                                                    \
  LAPRUNE_PASSES(T, name, false)                                                                    \
  LAPRUNE_PASSES(T, all_##name, true)                                                               \
  LAPRUNE_CLONES static Stats stats_##name(const T* r, int64_t n) {                                 \
    return stats_loop(r, n);                                                                        \
  }                                                                                                 \
  LAPRUNE_CLONES static double count_##name(const T* r, int64_t n, T cut) {                         \
    return count_loop(r, n, cut);                                                                   \
  }                                                                                                 \
  LAPRUNE_CLONES static void gather_##name(const T* r, int64_t n, T low, T high, T* out) {          \
    gather_loop(r, n, low, high, out);                                                              \
  }                                                                                                 \
  LAPRUNE_CLONES static GradSums grad_sums_##name(const T* r, const T* v, const T* g, int64_t n,    \
                                                  const GradPoint& at) {                            \
    return v ? grad_sums_loop<T, true>(r, v, g, n, at)                                              \
             : grad_sums_loop<T, false>(r, v, g, n, at);                                            \
  }                                                                                                 \
  LAPRUNE_CLONES static void grad_write_##name(const T* r, const T* v, const T* g, int64_t n,       \
                                               const GradPoint& at, T* dr, T* dv) {                 \
    if (!v) grad_write_loop<T, false, false>(r, v, g, n, at, dr, dv);                               \
    else if (dv) grad_write_loop<T, true, false>(r, v, g, n, at, dr, dv);                           \
    else grad_write_loop<T, true, true>(r, v, g, n, at, dr, dv);                                    \
  }                                                                                                 \
  template <>                                                                                       \
  struct Kernels<T> {                                                                               \
    static Sums pass(const T* r, int64_t n, const Point& at, bool all, const T* v, T* out) {        \
      if (!out) return all ? pass_all_##name(r, n, at) : pass_##name(r, n, at);                     \
      if (!v) return all ? write_all_##name(r, n, at, out) : write_##name(r, n, at, out);           \
      return all ? gate_all_##name(r, n, at, v, out) : gate_##name(r, n, at, v, out);               \
    }                                                                                               \
    static constexpr auto stats = stats_##name;                                                     \
    static constexpr auto count = count_##name;                                                     \
    static constexpr auto gather = gather_##name;                                                   \
    static constexpr auto grad_sums = grad_sums_##name;                                             \
    static constexpr auto grad_write = grad_write_##name;                                           \
  };

LAPRUNE_KERNELS(float, f32)
LAPRUNE_KERNELS(double, f64)

}  // namespace laprune
