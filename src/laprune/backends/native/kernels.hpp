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
#else
#define LAPRUNE_CLONES
#endif

namespace laprune {

constexpr int64_t kBlock = 256;  // scores summed in their own type before they join a double

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
  return bits<float>(bits<int32_t>(p) + (bits<int32_t>(shifted) << 23));
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
  return bits<double>(bits<int64_t>(p) + (bits<int64_t>(shifted) << 52));
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

template <typename T>
LAPRUNE_INLINE T half_exp(T z, T c_lo, bool eligible) {
  const T w = std::abs(z);
  const T cut = w < max_z<T>() ? w : max_z<T>();
  return eligible ? T(0.5) * exp_minus(cut, z > T(0) ? -c_lo : c_lo) : T(0);
}

// One pass: all sums of the solver; writes the mask, or mask * values, when `out` is given.
template <typename T, bool kWrite, bool kGate>
LAPRUNE_INLINE Sums pass_loop(const T* r, int64_t n, const Point& at, const T* values, T* out) {
  const Affine<T> z_of(at.pivot, at.b, at.t);
  const T a = static_cast<T>(at.a), rest = static_cast<T>(1 - at.a);
  const T inf = std::numeric_limits<T>::infinity();
  Sums total;
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t stop = std::min(n, start + kBlock);
    T count = 0, bad = 0, N = 0, q_lo = 0, q_hi = 0, qw_lo = 0, qw_hi = 0, qq_lo = 0, qq_hi = 0,
      qqw_lo = 0, qqw_hi = 0, spread = 0, below = -inf, above = inf, gap = inf;
#pragma omp simd reduction(+ : count, bad, N, q_lo, q_hi, qw_lo, qw_hi) \
    reduction(+ : qq_lo, qq_hi, qqw_lo, qqw_hi, spread) \
    reduction(max : below) reduction(min : above, gap)
    for (int64_t i = start; i < stop; ++i) {
      const T x = r[i];
      const T z = z_of(x);
      const bool ok = x > -inf, hi = z > T(0);
      const T w = std::abs(z) < max_z<T>() ? std::abs(z) : max_z<T>();
      const T q = half_exp(z, z_of.c_lo, ok);
      const T p = hi ? T(1) - q : q;
      const T d = ok ? (hi ? rest - q : q - a) : T(0);  // p - a, without rounding 1 - q
      const T far = std::abs(x - z_of.pivot);
      count += ok ? T(1) : T(0);
      bad += x < inf ? T(0) : T(1);
      N += hi ? T(1) : T(0);
      const T hi_q = hi ? q : T(0), lo_q = hi ? T(0) : q;
      // Squares that would be subnormal are nothing beside q, and slow.
      const T factor = w < max_z<T>() / 2 ? q : T(0), qw = factor * w;
      q_lo += lo_q, q_hi += hi_q;
      qw_lo += lo_q * w, qw_hi += hi_q * w;
      qq_lo += lo_q * factor, qq_hi += hi_q * factor;
      qqw_lo += lo_q * qw, qqw_hi += hi_q * qw;
      spread += d * d;
      const T under = ok && !hi ? x : -inf, over = hi ? x : inf, other = far > T(0) ? far : inf;
      below = under > below ? under : below;
      above = over < above ? over : above;
      gap = other < gap ? other : gap;
      const T mask = w < max_z<T>() ? p : (hi ? T(1) : T(0));  // beyond max_z there is nothing
      if (kWrite) out[i] = kGate ? (mask == T(0) ? T(0) : mask * values[i]) : mask;
    }
    total.add({count, bad, N, q_lo, q_hi, qw_lo, qw_hi, qq_lo, qq_hi, qqw_lo, qqw_hi, spread, below,
               above, gap});
  }
  return total;
}

// First look at a row, to start from: eligible count, NaN or +inf, extremes, and the sums of
// r - shift and |r - shift|.
struct Stats {
  double count = 0, bad = 0, low = kInf, high = -kInf, sum = 0;
  void add(const Stats& o) {
    count += o.count, bad += o.bad, sum += o.sum;
    low = std::min(low, o.low), high = std::max(high, o.high);
  }
};

template <typename T>
LAPRUNE_INLINE Stats stats_loop(const T* r, int64_t n) {
  const T inf = std::numeric_limits<T>::infinity();
  Stats total;
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t stop = std::min(n, start + kBlock);
    T count = 0, bad = 0, low = inf, high = -inf;
    double sum = 0;
#pragma omp simd reduction(+ : count, bad, sum) reduction(min : low) reduction(max : high)
    for (int64_t i = start; i < stop; ++i) {
      const T x = r[i];
      const bool ok = x > -inf;
      count += ok ? T(1) : T(0);
      bad += x < inf ? T(0) : T(1);
      low = ok && x < low ? x : low;
      high = x > high ? x : high;
      sum += ok ? static_cast<double>(x) : 0.0;
    }
    total.add({count, bad, low, high, sum});
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
  const T mean_p = static_cast<T>(at.mean_p), inf = std::numeric_limits<T>::infinity();
  GradSums total;
  for (int64_t start = 0; start < n; start += kBlock) {
    const int64_t stop = std::min(n, start + kBlock);
    T count = 0, s0 = 0, s1 = 0, u0 = 0, cov = 0, g0 = 0, g1 = 0;
#pragma omp simd reduction(+ : count, s0, s1, u0, cov, g0, g1)
    for (int64_t i = start; i < stop; ++i) {
      const T x = r[i], z = z_of(x);
      const bool ok = x > -inf;
      const T q = half_exp(z, z_of.c_lo, ok);
      const T p = z > T(0) ? T(1) - q : q;
      const T qy = q * (ok ? y_of(x) - y_of.c_lo : T(0)), v = p - mean_p;
      const bool near = ok && std::abs(z) < reach<T>();
      const T e = near ? (kGate ? g[i] * values[i] : g[i]) : T(0);
      count += ok ? T(1) : T(0);
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
  const T c0 = static_cast<T>(at.c0), c1 = static_cast<T>(at.c1), inv_t = z_of.inv_t;
  const T inf = std::numeric_limits<T>::infinity();
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const T x = r[i], z = z_of(x);
    const bool ok = x > -inf;
    const T q = half_exp(z, z_of.c_lo, ok && std::abs(z) < reach<T>());
    const T p = z > T(0) ? T(1) - q : q;
    const T e = ok ? (kGate ? g[i] * values[i] : g[i]) : T(0);
    const T d = (q * inv_t) * ((e - c0) - c1 * p);
    const T direct = kGate && ok ? g[i] * p : T(0);
    dr[i] = kSelf ? d + direct : d;
    if (kGate && !kSelf) dvalues[i] = direct;
  }
}

// The loops as plain functions, so that each is compiled once per instruction set.
template <typename T>
struct Kernels;

#define LAPRUNE_KERNELS(T, name)                                                                    \
  LAPRUNE_CLONES static Sums pass_##name(const T* r, int64_t n, const Point& at) {                  \
    return pass_loop<T, false, false>(r, n, at, nullptr, nullptr);                                  \
  }                                                                                                 \
  LAPRUNE_CLONES static Sums write_##name(const T* r, int64_t n, const Point& at, T* out) {         \
    return pass_loop<T, true, false>(r, n, at, nullptr, out);                                       \
  }                                                                                                 \
  LAPRUNE_CLONES static Sums gate_##name(const T* r, int64_t n, const Point& at, const T* v,        \
                                         T* out) {                                                  \
    return pass_loop<T, true, true>(r, n, at, v, out);                                              \
  }                                                                                                 \
  LAPRUNE_CLONES static Stats stats_##name(const T* r, int64_t n) {                                 \
    return stats_loop(r, n);                                                                        \
  }                                                                                                 \
  LAPRUNE_CLONES static double count_##name(const T* r, int64_t n, T cut) {                         \
    return count_loop(r, n, cut);                                                                   \
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
    static Sums pass(const T* r, int64_t n, const Point& at, const T* v, T* out) {                  \
      return !out ? pass_##name(r, n, at)                                                           \
                  : v ? gate_##name(r, n, at, v, out) : write_##name(r, n, at, out);                \
    }                                                                                               \
    static constexpr auto stats = stats_##name;                                                     \
    static constexpr auto count = count_##name;                                                     \
    static constexpr auto grad_sums = grad_sums_##name;                                             \
    static constexpr auto grad_write = grad_write_##name;                                           \
  };

LAPRUNE_KERNELS(float, f32)
LAPRUNE_KERNELS(double, f64)

}  // namespace laprune
