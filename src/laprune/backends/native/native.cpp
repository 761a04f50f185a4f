// The CPU backend behind a C interface: rows of scores in, masks and gradients out. Rows are solved in
// rows.hpp; their gradients are here.
// state, per row: pivot, b (relative to the pivot), t, and the q-weighted means of z and p.
// Hard rows keep the threshold in `pivot` and what the scores equal to it share in `b`.

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "rows.hpp"

namespace laprune {
namespace {

template <typename T>
struct GradRow {
  Row<T> row;
  const T* upstream;
  T* dscores;
  T* dvalues;  // nullptr: not gated, or gated by the scores themselves

  // No gradient through p itself; what flows through the values where the row is gated.
  template <typename F>
  void direct(F&& p) const {
    for (int64_t i = 0; i < row.n; ++i) {
      const T d = row.values ? upstream[i] * p(row.scores[i]) : T(0);
      if (dvalues) dvalues[i] = d;
      dscores[i] = dvalues ? T(0) : d;
    }
  }
};

struct RowGrad {
  double dk, dhardness;
};

template <typename T>
RowGrad grad_row(const GradRow<T>& job, double k, double hardness, bool fixed, Status status,
                 const double* state, const double* grad_state) {
  const Row<T>& row = job.row;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  GradPoint at{state[0], state[1], state[2], state[3], state[4], 0, 0};
  const T inf = std::numeric_limits<T>::infinity();
  if (status == kNonFinite) {
    job.direct([](T) { return std::numeric_limits<T>::quiet_NaN(); });
    for (int64_t i = 0; i < row.n; ++i) job.dscores[i] = static_cast<T>(nan);
    return {nan, nan};
  }
  if (status == kHard) {
    job.direct(HardMask<T>{static_cast<T>(at.pivot), at.b});
    return {0, 0};
  }
  if (status == kUniform || status == kConstant || status == kInfeasible) {
    job.direct([&](T x) { return x > -inf ? static_cast<T>(at.mean_p) : T(0); });
    double sum = 0;
    for (int64_t i = 0; i < row.n; ++i)
      if (row.scores[i] > -inf)
        sum += static_cast<double>(row.values ? job.upstream[i] * row.values[i] : job.upstream[i]);
    return {status == kInfeasible ? 0 : sum * at.mean_p / k, 0};
  }
  const double t = at.t, gb = grad_state ? grad_state[1] : 0, gt = grad_state ? grad_state[2] : 0;
  const GradSums s = row.template reduce<GradSums>([&](int64_t start, int64_t size) {
    return Kernels<T>::grad_sums(row.scores + start, row.values ? row.values + start : nullptr,
                                 job.upstream + start, size, at);
  });
  const double g0 = s.g0 - t * gb;
  if (status == kTied) {  // p sits in its t -> 0 limit, where only the budget moves it
    const Affine<T> z_of(at.pivot, at.b, t);
    job.direct([&](T x) {
      const T z = z_of(x), q = half_exp(z, size(z), z_of.c_lo, x > -inf ? T(1) : T(0));
      return z > T(0) ? T(1) - q : q;
    });
    return {g0 / s.s0, 0};
  }
  const double z_bar = at.mean_z + s.s1 / s.s0, p_bar = at.mean_p + s.u0 / s.s0;
  const double cov = s.cov - s.s1 * s.u0 / s.s0;
  if (!fixed && cov > 0) at.c1 = (s.g1 - s.s1 / s.s0 * s.g0 - t * gt + z_bar * t * gb) / cov;
  at.c0 = g0 / s.s0 - at.c1 * p_bar;
  row.for_chunks([&](int64_t, int64_t start, int64_t size) {
    Kernels<T>::grad_write(row.scores + start, row.values ? row.values + start : nullptr,
                           job.upstream + start, size, at, job.dscores + start,
                           job.dvalues ? job.dvalues + start : nullptr);
  });
  if (fixed) return {at.c0, (at.c0 * s.s1 - s.g1) / t - at.mean_z * gb + gt};
  const double a = k / s.count;
  return {at.c0 + 0.5 * at.c1 * (2 * a + (1 - 2 * a) * hardness), 0.5 * at.c1 * k * (1 - a)};
}

// Rows side by side, one thread each; a few long rows one after another, all threads on each.
template <typename Work>
void for_rows(int64_t rows, int64_t n, int threads, Work&& work) {
  if (rows * n <= kAlone) threads = 1;
  const bool together = n > kLong && rows < 4 * threads;
  Team team(threads);
  if (together) {
    for (int64_t i = 0; i < rows; ++i) work(i, team.size() > 1 ? &team : nullptr);
    return;
  }
  const int64_t batch = std::max<int64_t>(1, kAlone / (4 * std::max<int64_t>(n, 1)));
  std::atomic<int64_t> next{0};
  team.run([&](int) {
    for (int64_t from; (from = next.fetch_add(batch)) < rows;)
      for (int64_t i = from; i < std::min(rows, from + batch); ++i) work(i, nullptr);
  });
}

template <typename T>
void solve(const T* scores, const T* values, T* out, int64_t rows, int64_t n, const double* k,
           const double* hardness, int fixed, double* state, int32_t* info, int threads) {
  for_rows(rows, n, threads, [&](int64_t i, Team* team) {
    const Row<T> row{scores + i * n, values ? values + i * n : nullptr, out + i * n, n, team};
    const Answer answer = solve_row(row, k[i], hardness[i], fixed != 0);
    const double packed[kStateSize] = {answer.at.pivot, answer.at.b, answer.at.t, answer.mean_z,
                                       answer.mean_p};
    std::copy(packed, packed + kStateSize, state + i * kStateSize);
    info[i * kInfoSize] = answer.status, info[i * kInfoSize + 1] = answer.passes;
  });
}

template <typename T>
void vjp(const T* scores, const T* values, const T* upstream, T* dscores, T* dvalues, int64_t rows,
         int64_t n, const double* k, const double* hardness, int fixed, const double* state,
         const int32_t* info, const double* grad_state, double* dk, double* dhardness, int threads) {
  for_rows(rows, n, threads, [&](int64_t i, Team* team) {
    const Row<T> row{scores + i * n, values ? values + i * n : nullptr, nullptr, n, team};
    const GradRow<T> job{row, upstream + i * n, dscores + i * n, dvalues ? dvalues + i * n : nullptr};
    const RowGrad grad =
        grad_row(job, k[i], hardness[i], fixed != 0, static_cast<Status>(info[i * kInfoSize]),
                 state + i * kStateSize, grad_state ? grad_state + i * kStateSize : nullptr);
    dk[i] = grad.dk, dhardness[i] = grad.dhardness;
  });
}

}  // namespace
}  // namespace laprune

#include "pieces.hpp"

#if defined(_WIN32)
#define LAPRUNE_API extern "C" __declspec(dllexport)
#else
#define LAPRUNE_API extern "C" __attribute__((visibility("default")))
#endif

// Memory that was never touched, in large pages where the system has them: to fault it in page by page
// takes longer than to write it.
LAPRUNE_API void laprune_fresh(void* memory, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 1 << 21;
  const uintptr_t start = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t from = (start + kPage - 1) & ~(kPage - 1), to = (start + bytes) & ~(kPage - 1);
  if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
}

#define LAPRUNE_ENTRIES(T, name)                                                                    \
  LAPRUNE_API void laprune_solve_##name(const T* scores, const T* values, T* out, int64_t rows,     \
                                        int64_t n, const double* k, const double* hardness,         \
                                        int fixed, double* state, int32_t* info, int threads) {     \
    laprune::solve(scores, values, out, rows, n, k, hardness, fixed, state, info, threads);         \
  }                                                                                                 \
  LAPRUNE_API void laprune_vjp_##name(                                                              \
      const T* scores, const T* values, const T* upstream, T* dscores, T* dvalues, int64_t rows,    \
      int64_t n, const double* k, const double* hardness, int fixed, const double* state,           \
      const int32_t* info, const double* grad_state, double* dk, double* dhardness, int threads) {  \
    laprune::vjp(scores, values, upstream, dscores, dvalues, rows, n, k, hardness, fixed, state,    \
                 info, grad_state, dk, dhardness, threads);                                         \
  }

LAPRUNE_ENTRIES(float, f32)
LAPRUNE_ENTRIES(double, f64)

// Rows in pieces: what a driver needs to solve a row whose scores lie in several arrays.
LAPRUNE_API int64_t laprune_iteration_size() { return sizeof(laprune::Iteration); }

LAPRUNE_API void laprune_begin(int64_t rows, const double* n, const double* k, const double* target,
                               int fixed, const double* tol, const double* start, void* iterations,
                               double* points, int32_t* info) {
  laprune::begin(rows, n, k, target, fixed, tol, start, iterations, points, info);
}

LAPRUNE_API int laprune_step(int64_t rows, const double* sums, void* iterations, double* points,
                             double* means, int32_t* info) {
  return laprune::step(rows, sums, iterations, points, means, info);
}

#define LAPRUNE_PIECES(T, name)                                                                     \
  LAPRUNE_API void laprune_look_##name(const T** scores, const int64_t* sizes, int64_t count,       \
                                       int64_t rows, double* stats,                                 \
                                       int threads) {                                               \
    laprune::look(laprune::Pieces<T>{scores, sizes, count, rows}, stats, threads);                  \
  }                                                                                                 \
  LAPRUNE_API void laprune_sums_##name(const T** scores, const int64_t* sizes, int64_t count,       \
                                       int64_t rows, const double* points, T** out, double* sums,   \
                                       int threads) {                                               \
    laprune::sums(laprune::Pieces<T>{scores, sizes, count, rows}, points, out, sums, threads);      \
  }                                                                                                 \
  LAPRUNE_API void laprune_digits_##name(const T** scores, const int64_t* sizes, int64_t count,     \
                                         int64_t rows, const int64_t* prefix, int shift,            \
                                         int64_t* counts, int threads) {                            \
    laprune::digits(laprune::Pieces<T>{scores, sizes, count, rows}, prefix, shift, counts,          \
                    threads);                                                                       \
  }                                                                                                 \
  LAPRUNE_API void laprune_write_##name(const T** scores, const int64_t* sizes, int64_t count,      \
                                        int64_t rows, const double* state, const int32_t* status,   \
                                        const double* share, T** out, int threads) {                \
    laprune::write(laprune::Pieces<T>{scores, sizes, count, rows}, state, status, share, out,       \
                   threads);                                                                        \
  }                                                                                                 \
  LAPRUNE_API void laprune_moments_##name(const T** scores, const int64_t* sizes, int64_t count,    \
                                          int64_t rows, const T** upstream, const double* state,    \
                                          const int32_t* status, double* moments, int threads) {    \
    laprune::moments(laprune::Pieces<T>{scores, sizes, count, rows}, upstream, state, status,       \
                     moments, threads);                                                             \
  }                                                                                                 \
  LAPRUNE_API void laprune_pull_##name(const T** scores, const int64_t* sizes, int64_t count,       \
                                       int64_t rows, const T** upstream, const double* state,       \
                                       const int32_t* status, const double* slopes, T** dscores,    \
                                       int threads) {                                               \
    laprune::pull(laprune::Pieces<T>{scores, sizes, count, rows}, upstream, state, status, slopes,  \
                  dscores, threads);                                                                \
  }                                                                                                 \
  LAPRUNE_API void laprune_start_##name(const T* sample, int64_t rows, int64_t n, const double* k,  \
                                        const double* target, int fixed, double* start,             \
                                        int32_t* found, int threads) {                              \
    laprune::start_rows(sample, rows, n, k, target, fixed, start, found, threads);                  \
  }

LAPRUNE_PIECES(float, f32)
LAPRUNE_PIECES(double, f64)
