// Rows whose scores lie in several arrays: the loops over all of them at once, and the iteration as a
// thing that is fed sums from outside. Included by native.cpp, whose rows and kernels it uses.
#pragma once

namespace laprune {
namespace {

// scores[i] holds `rows` rows of sizes[i] scores each.
template <typename T>
struct Pieces {
  const T** scores;
  const int64_t* sizes;
  int64_t count, rows;
};

// A stretch of one row in one piece: what a thread does in one go.
struct Stretch {
  int64_t row, piece, start, size;
};

// All stretches, row by row and in the order of the pieces; rows that `whole` names are not cut.
template <typename T, typename Whole>
std::vector<Stretch> stretches(const Pieces<T>& in, Whole&& whole) {
  std::vector<Stretch> all;
  for (int64_t row = 0; row < in.rows; ++row) {
    for (int64_t i = 0; i < in.count; ++i) {
      const int64_t n = in.sizes[i], most = whole(row) ? std::max<int64_t>(n, 1) : kChunk;
      for (int64_t start = 0; start < n; start += most)
        all.push_back({row, i, start, std::min(most, n - start)});
    }
  }
  return all;
}

template <typename Work>
void for_stretches(const std::vector<Stretch>& all, int threads, Work&& work) {
  int64_t scores = 0;
  for (const Stretch& s : all) scores += s.size;
  const int64_t count = static_cast<int64_t>(all.size());
  const int64_t useful = std::min<int64_t>(count, scores / kAlone + 1);
  Team team(static_cast<int>(std::min<int64_t>(threads, useful)));
  const int64_t batch = std::max<int64_t>(1, count / (16 * team.size()));
  std::atomic<int64_t> next{0};
  team.run([&](int) {
    for (int64_t from; (from = next.fetch_add(batch)) < count;)
      for (int64_t i = from; i < std::min(count, from + batch); ++i) work(i, all[i]);
  });
}

// Adds up work(stretch) by row, in order, whatever the threads.
template <typename Result, typename T, typename Work>
std::vector<Result> reduce_rows(const Pieces<T>& in, int threads, Work&& work) {
  const std::vector<Stretch> all = stretches(in, [](int64_t) { return false; });
  std::vector<Result> parts(all.size()), totals(in.rows);
  for_stretches(all, threads, [&](int64_t i, const Stretch& s) {
    parts[i] = work(s, in.scores[s.piece] + s.row * in.sizes[s.piece] + s.start);
  });
  for (size_t i = 0; i < all.size(); ++i) totals[all[i].row].add(parts[i]);
  return totals;
}

template <typename T>
void look(const Pieces<T>& in, double* out, int threads) {
  const auto totals = reduce_rows<Stats>(in, threads, [&](const Stretch& s, const T* r) {
    return Kernels<T>::stats(r, s.size);
  });
  for (const Stats& s : totals)
    for (double x : {s.count, s.bad, s.low, s.high, s.sum}) *out++ = x;
}

template <typename T>
void sums(const Pieces<T>& in, const double* points, T** masks, double* out, int threads) {
  const auto totals = reduce_rows<Sums>(in, threads, [&](const Stretch& s, const T* r) {
    const double* p = points + 4 * s.row;
    T* mask = masks ? masks[s.piece] + s.row * in.sizes[s.piece] + s.start : nullptr;
    return Kernels<T>::pass(r, s.size, {p[0], p[1], p[2], p[3]}, true, nullptr, mask);
  });
  for (const Sums& s : totals)
    for (double x : {s.above_count, s.q_lo, s.q_hi, s.qw_lo, s.qw_hi, s.qq_lo, s.qq_hi, s.qqw,
                     s.spread, s.below, s.above, s.gap})
      *out++ = x;
}

// How often each value of the 8 bits at `shift` occurs among scores whose higher bits are `prefix`.
template <typename T>
void digits(const Pieces<T>& in, const int64_t* prefix, int shift, int64_t* counts, int threads) {
  using Key = decltype(order(T{}));
  constexpr int kBits = sizeof(Key) * 8;
  const Key mask = shift + 8 == kBits ? 0 : ~Key(0) << (shift + 8);
  const std::vector<Stretch> all = stretches(in, [](int64_t) { return false; });
  std::mutex adding;
  for_stretches(all, threads, [&](int64_t, const Stretch& s) {
    const T* r = in.scores[s.piece] + s.row * in.sizes[s.piece] + s.start;
    const Key wanted = static_cast<Key>(prefix[s.row]);
    int64_t found[256] = {};
    for (int64_t i = 0; i < s.size; ++i) {
      const Key key = order(r[i]);
      if ((key & mask) == wanted) ++found[(key >> shift) & 255];
    }
    const std::lock_guard<std::mutex> lock(adding);
    for (int d = 0; d < 256; ++d) counts[256 * s.row + d] += found[d];
  });
}

inline bool soft(int32_t status) {
  return status == kConverged || status == kTied || status == kStalled;
}

// share: what the scores equal to the threshold of a hard row are left with, by row and piece.
template <typename T>
void write(const Pieces<T>& in, const double* state, const int32_t* status, const double* share,
           T** out, int threads) {
  const auto all = stretches(in, [&](int64_t row) { return status[row] == kHard; });
  for_stretches(all, threads, [&](int64_t, const Stretch& s) {
    const int64_t at = s.row * in.sizes[s.piece] + s.start;
    const double* y = state + kStateSize * s.row;
    const Row<T> row{in.scores[s.piece] + at, nullptr, out[s.piece] + at, s.size, nullptr};
    if (soft(status[s.row])) row.pass({y[0], y[1], y[2], 0}, false, true);
    else if (status[s.row] == kHard)
      row.fill(HardMask<T>{static_cast<T>(y[0]), share[s.row * in.count + s.piece]});
    else if (status[s.row] == kNonFinite) non_finite(row);
    else level(row, kUniform, y[4]);
  });
}

struct Moments : GradSums {
  double level = 0;  // the sum of the upstream gradient over eligible scores
  void add(const Moments& o) { GradSums::add(o), level += o.level; }
};

template <typename T>
void moments(const Pieces<T>& in, const T** upstream, const double* state, const int32_t* status,
             double* out, int threads) {
  const auto totals = reduce_rows<Moments>(in, threads, [&](const Stretch& s, const T* r) {
    const T* g = upstream[s.piece] + s.row * in.sizes[s.piece] + s.start;
    const double* y = state + kStateSize * s.row;
    Moments m;
    if (soft(status[s.row])) {
      static_cast<GradSums&>(m) =
          Kernels<T>::grad_sums(r, nullptr, g, s.size, {y[0], y[1], y[2], y[3], y[4], 0, 0});
      return m;
    }
    for (int64_t i = 0; i < s.size; ++i) {
      const bool ok = r[i] > -std::numeric_limits<T>::infinity();
      m.count += ok, m.level += ok ? static_cast<double>(g[i]) : 0.0;
    }
    return m;
  });
  for (const Moments& m : totals)
    for (double x : {m.count, m.s0, m.s1, m.u0, m.cov, m.g0, m.g1, m.level}) *out++ = x;
}

// slopes: c0 and c1 by row, dr = q/t (g - c0 - c1 p).
template <typename T>
void pull(const Pieces<T>& in, const T** upstream, const double* state, const int32_t* status,
          const double* slopes, T** dscores, int threads) {
  for_stretches(stretches(in, [](int64_t) { return false; }), threads,
                [&](int64_t, const Stretch& s) {
    const int64_t at = s.row * in.sizes[s.piece] + s.start;
    const double *y = state + kStateSize * s.row, *c = slopes + 2 * s.row;
    T* d = dscores[s.piece] + at;
    if (status[s.row] == kConverged || status[s.row] == kStalled)
      Kernels<T>::grad_write(in.scores[s.piece] + at, nullptr, upstream[s.piece] + at, s.size,
                             {y[0], y[1], y[2], y[3], y[4], c[0], c[1]}, d, nullptr);
    else
      std::fill(d, d + s.size,
                status[s.row] == kNonFinite ? std::numeric_limits<T>::quiet_NaN() : T(0));
  });
}

template <typename T>
void start_rows(const T* sample, int64_t rows, int64_t n, const double* k, const double* target,
                int fixed, double* out, int32_t* found, int threads) {
  for_rows(rows, n, threads, [&](int64_t i, Team* team) {
    Start start{0, 0, 0};
    const Row<T> row{sample + i * n, nullptr, nullptr, n, team};
    found[i] = start_from(row, k[i], target[i], fixed != 0, &start);
    out[3 * i] = start.pivot, out[3 * i + 1] = start.b, out[3 * i + 2] = start.tau;
  });
}

static_assert(std::is_trivially_copyable<Iteration>::value, "iterations live in the caller's memory");

void put(const Iteration& it, double* point) {
  point[0] = it.at.pivot, point[1] = it.at.b, point[2] = it.at.t, point[3] = it.at.a;
}

// info, per row: status and passes. points: where the next sums are wanted.
void begin(int64_t rows, const double* n, const double* k, const double* target, int fixed,
           const double* tol, const double* start, void* iterations, double* points, int32_t* info) {
  for (int64_t i = 0; i < rows; ++i) {
    const Problem problem{n[i], k[i], target[i], fixed != 0, {tol[0], tol[1], tol[2]}};
    const Iteration it(problem, start[3 * i], start[3 * i + 1], start[3 * i + 2]);
    std::memcpy(static_cast<char*>(iterations) + i * sizeof it, &it, sizeof it);
    put(it, points + 4 * i);
    info[kInfoSize * i] = kStalled, info[kInfoSize * i + 1] = 0;
  }
}

// Feeds every running row its sums. Returns 0 when none runs any more, 2 when the next points of all
// that do should be their answers, 1 otherwise; a row that is done keeps its point.
int step(int64_t rows, const double* sums, void* iterations, double* points, double* means,
         int32_t* info) {
  bool running = false, polish = true;
  for (int64_t i = 0; i < rows; ++i, sums += kSums) {
    int32_t* row = info + kInfoSize * i;
    if (row[0] != kStalled || row[1] >= kMaxPasses) continue;
    Iteration it(Problem{}, 0, 0, 0);
    void* place = static_cast<char*>(iterations) + i * sizeof it;
    std::memcpy(&it, place, sizeof it);
    Sums s;
    double* fields[kSums] = {&s.above_count, &s.q_lo,   &s.q_hi,   &s.qw_lo, &s.qw_hi, &s.qq_lo, &s.qq_hi,
                          &s.qqw,         &s.spread, &s.below, &s.above, &s.gap};
    for (int f = 0; f < kSums; ++f) *fields[f] = sums[f];
    row[0] = it.step(s), row[1] = it.passes;
    means[2 * i] = it.mean_z, means[2 * i + 1] = it.mean_p;
    if (row[0] != kStalled || row[1] >= kMaxPasses) continue;
    running = true, polish = polish && it.polish;
    std::memcpy(place, &it, sizeof it);
    put(it, points + 4 * i);
  }
  return !running ? 0 : polish ? 2 : 1;
}

}  // namespace
}  // namespace laprune
