// One row at a time, alone or with a team: where its iteration starts, which of its scores a pass
// reads, and what a row comes to that needs no iteration. Included by native.cpp.
#pragma once

#include <numeric>
#include <vector>

#include "kernels.hpp"
#include "solver.hpp"
#include "team.hpp"

namespace laprune {
namespace {

constexpr int64_t kChunk = 1 << 16;    // scores per unit of work: sums do not depend on the threads
constexpr int64_t kLong = 1 << 16;     // rows longer than this start from a sample
constexpr int64_t kSampleRatio = 256;  // one score in so many
constexpr int64_t kMinSample = 2048;
constexpr double kMinDoubt = 8;        // least k (1-a) of a sample that says anything
constexpr int kRounds = 4;             // counts that locate the barrier
constexpr int64_t kWorthwhile = 1000;  // scores from which it is worth leaving some of them out
constexpr double kShare = 0.3;         // most of a row that is worth a copy to solve it by itself
constexpr double kLongShare = 0.1;     // and of a long row, whose copy is memory that shows
constexpr double kNothing = 0.05;      // of the tolerance of the mass: what all scores left out may weigh
constexpr double kMargin = 1.25;       // by how much the temperature may yet grow
constexpr int kTries = 3;              // points at which to leave some out
constexpr int64_t kAlone = 1 << 15;    // less work than this is not worth a thread
constexpr int kStateSize = 5, kInfoSize = 2, kSums = 12;

template <typename T>
constexpr Tolerance tolerance();
template <>
constexpr Tolerance tolerance<float>() { return {4e-7, 1e-5, 80}; }
template <>
constexpr Tolerance tolerance<double>() { return {2.5e-13, 1e-8, 700}; }

// Work on one row, alone or with a team.
template <typename T>
struct Row {
  const T* scores;
  const T* values;  // nullptr: the mask itself is wanted
  T* out;
  int64_t n;
  Team* team;

  int64_t chunks() const { return (n + kChunk - 1) / kChunk; }

  template <typename Result, typename Work>
  Result reduce(Work&& work) const {
    if (chunks() == 1) return work(0, n);
    std::vector<Result> parts(chunks());
    for_chunks([&](int64_t c, int64_t start, int64_t size) { parts[c] = work(start, size); });
    Result total = parts[0];
    for (int64_t c = 1; c < chunks(); ++c) total.add(parts[c]);
    return total;
  }

  template <typename Work>
  void for_chunks(Work&& work) const {
    const auto some = [&](int64_t from, int64_t to) {
      for (int64_t c = from; c < to; ++c) work(c, c * kChunk, std::min(kChunk, n - c * kChunk));
    };
    if (!team) return some(0, chunks());
    const int64_t size = team->size();
    team->run([&](int i) { some(chunks() * i / size, chunks() * (i + 1) / size); });
  }

  Sums pass(const Point& at, bool all, bool write) const {
    return reduce<Sums>([&](int64_t start, int64_t size) {
      return Kernels<T>::pass(scores + start, size, at, all, values ? values + start : nullptr,
                              write ? out + start : nullptr);
    });
  }

  Stats stats() const {
    return reduce<Stats>([&](int64_t start, int64_t size) {
      return Kernels<T>::stats(scores + start, size);
    });
  }

  double count(T cut) const {
    struct Count {
      double value = 0;
      void add(const Count& o) { value += o.value; }
    };
    return reduce<Count>([&](int64_t start, int64_t size) {
      return Count{Kernels<T>::count(scores + start, size, cut)};
    }).value;
  }

  // Writes f(score) for every score, times its value where the row is gated.
  template <typename F>
  void fill(F&& f) const {
    for (int64_t i = 0; i < n; ++i) {
      const T p = f(scores[i]);
      out[i] = values ? (p == T(0) ? T(0) : p * values[i]) : p;
    }
  }
};

struct Answer {
  Status status;
  Point at;
  double mean_z, mean_p;
  int passes;
  bool strained;
};

Answer limit(Status status, double pivot, double b, double t, double mean_p) {
  return {status, {pivot, b, t, 0}, 0, mean_p, 1, false};
}

// The p of a hard row, called in index order: scores equal to the threshold are served first come.
template <typename T>
struct HardMask {
  T threshold;
  double left;
  T operator()(T x) {
    if (!(x == threshold)) return x > threshold ? T(1) : T(0);
    const double share = std::min(1.0, std::max(left, 0.0));
    left -= share;
    return static_cast<T>(share);
  }
};

LAPRUNE_INLINE uint32_t order(float x) {
  const uint32_t u = bits<uint32_t>(x + 0.0f);  // -0 counts as 0
  return u >> 31 ? ~u : u | 0x80000000u;
}
LAPRUNE_INLINE uint64_t order(double x) {
  const uint64_t u = bits<uint64_t>(x + 0.0);
  return u >> 63 ? ~u : u | 0x8000000000000000ull;
}
LAPRUNE_INLINE float unorder(uint32_t u) { return bits<float>(u >> 31 ? u & 0x7fffffffu : ~u); }
LAPRUNE_INLINE double unorder(uint64_t u) {
  return bits<double>(u >> 63 ? u & 0x7fffffffffffffffull : ~u);
}

// The rank-th largest score (rank >= 1) and how many are larger, by radix: no copy, no sort.
template <typename T>
HardMask<T> select(const T* r, int64_t n, double k) {
  using Key = decltype(order(T{}));
  constexpr int kDigit = 8, kBits = sizeof(Key) * 8;
  const int64_t rank = static_cast<int64_t>(std::ceil(k));
  int64_t larger = 0;
  Key prefix = 0;
  for (int shift = kBits - kDigit; shift >= 0; shift -= kDigit) {
    int64_t histogram[1 << kDigit] = {};
    const Key mask = shift + kDigit == kBits ? 0 : ~Key(0) << (shift + kDigit);
    for (int64_t i = 0; i < n; ++i) {
      const Key key = order(r[i]);
      if ((key & mask) == prefix) ++histogram[(key >> shift) & ((1 << kDigit) - 1)];
    }
    int digit = (1 << kDigit) - 1;
    while (larger + histogram[digit] < rank) larger += histogram[digit--];
    prefix |= static_cast<Key>(digit) << shift;
  }
  return {unorder(prefix), k - static_cast<double>(larger)};
}

template <typename T>
Answer hard(const Row<T>& row, double k) {
  HardMask<T> mask{std::numeric_limits<T>::infinity(), 0};
  if (k > 0) mask = select(row.scores, row.n, k);
  const Answer answer = limit(kHard, mask.threshold, mask.left, 0, 0);
  row.fill([&](T x) { return mask(x); });
  return answer;
}

template <typename T>
Answer level(const Row<T>& row, Status status, double p) {
  row.fill([p](T x) { return x > -std::numeric_limits<T>::infinity() ? static_cast<T>(p) : T(0); });
  return limit(status, 0, 0, kInf, p);
}

template <typename T>
Answer non_finite(const Row<T>& row) {
  const T nan = std::numeric_limits<T>::quiet_NaN();
  for (int64_t i = 0; i < row.n; ++i) row.out[i] = nan;
  return limit(kNonFinite, nan, nan, nan, nan);
}

struct Start {
  double pivot, b, tau;
};

// Counts of the scores above some cuts locate the barrier; their density there says which
// temperature leaves as many scores undecided as gamma asks, or as the cuts leave in doubt.
template <typename T>
Start counting_start(const Row<T>& row, const Problem& problem, const Stats& stats) {
  const double n = problem.n, few = std::min(problem.k, n - problem.k), rest = 1 - few / n;
  const bool flip = 2 * problem.k > n;  // the few are the lowest scores
  const auto log_count = [&](T cut) {
    const double above = row.count(cut);
    return std::log(((flip ? n - above : above) + 0.25) / few);
  };
  const double mean = std::min(std::max(stats.sum / stats.count, stats.low), stats.high);
  double f = log_count(static_cast<T>(mean));
  // Regula falsi (Illinois) on the log of the count: more than `few` at lo, less at hi.
  double lo = mean, hi = flip ? stats.low : stats.high, f_lo = f, f_hi = std::log(0.25 / few);
  if (f <= 0) {
    lo = flip ? stats.high : stats.low, hi = mean;
    f_lo = std::log(n / few), f_hi = f;
  }
  double w_lo = f_lo, w_hi = f_hi;
  const auto between = [](double from, double to) { return from == to ? 0.5 : from / (from - to); };
  for (int i = 0, last = 0; i < kRounds; ++i) {
    const double share = std::min(std::max(between(w_lo, w_hi), 0.02), 0.98);
    const T cut = static_cast<T>(lo + share * (hi - lo));
    f = log_count(cut);
    const int side = f > 0 ? 1 : -1;
    const double half = side == last ? 0.5 : 1;
    if (side > 0) lo = cut, f_lo = w_lo = f, w_hi *= half;
    else hi = cut, f_hi = w_hi = f, w_lo *= half;
    last = side;
  }
  const double share = std::min(std::max(between(f_lo, f_hi), 0.0), 1.0), width = std::abs(hi - lo);
  const double pivot = static_cast<double>(static_cast<T>(lo + share * (hi - lo)));
  const double range = stats.high - stats.low;
  double soft = std::min(1 / std::sqrt(few * rest), 0.5);
  if (!problem.fixed) soft = std::max(soft, 1 / (1 + std::exp(problem.target)));
  double t = f_lo == f_hi ? range : soft * rest / 0.75 * width / (f_lo - f_hi);
  t = std::max(t, 0.3 * std::min(share, 1 - share) * width);
  t = std::max(std::min(t, range), 1e-7 * range);
  double tau = std::log(t);
  if (problem.fixed) tau = std::max(tau, problem.target);
  else tau -= 0.25 * std::min(problem.target, 0.0);
  return {pivot, 0, tau};
}

// Where gamma leaves few scores of a row undecided, most passes read only those: scores so many
// temperatures from the barrier that all of them together are nothing count as zeros and ones.
template <typename T>
class Band {
 public:
  Band(const Row<T>& row, const Problem& problem) : row_(row), problem_(problem) {}

  bool narrow() const { return !scores_.empty(); }

  // Leaves out what may be left out at a point, if that is worth it.
  void close(const Point& at) {
    if (narrow() || tries_ == 0 || row_.n < kWorthwhile) return;
    --tries_;
    const double b = at.pivot + at.b, wide = kMargin * reach(at);
    low_ = static_cast<T>(b - wide), high_ = static_cast<T>(b + wide);
    if (!(low_ < high_ && std::isfinite(low_) && std::isfinite(high_))) return;
    // Every chunk has its own stretch, and a place more than it needs.
    std::vector<double> over(row_.chunks());
    std::vector<int64_t> starts(row_.chunks() + 1);
    row_.for_chunks([&](int64_t c, int64_t start, int64_t size) {
      const T* r = row_.scores + start;
      over[c] = Kernels<T>::count(r, size, high_);
      starts[c + 1] = static_cast<int64_t>(Kernels<T>::count(r, size, low_) - over[c]) + 1;
    });
    for (int64_t c = 0; c < row_.chunks(); ++c) starts[c + 1] += starts[c];
    if (starts.back() > (row_.n > kLong ? kLongShare : kShare) * row_.n) return;
    over_ = std::accumulate(over.begin(), over.end(), 0.0);
    scores_.resize(starts.back());
    row_.for_chunks([&](int64_t c, int64_t start, int64_t size) {
      Kernels<T>::gather(row_.scores + start, size, low_, high_, scores_.data() + starts[c]);
      scores_[starts[c + 1] - 1] = -std::numeric_limits<T>::infinity();
    });
  }

  // Back to the whole row.
  void open() { scores_.clear(); }

  // Whether what was left out is nothing at this point either.
  bool holds(const Point& at) const {
    const double b = at.pivot + at.b, wide = reach(at);
    return low_ < b - wide && b + wide < high_;
  }

  Sums pass(const Point& at) const {
    const int64_t size = static_cast<int64_t>(scores_.size());
    Sums sums = Row<T>{scores_.data(), nullptr, nullptr, size, row_.team}.pass(at, false, false);
    sums.above_count += over_;
    return sums;
  }

 private:
  double reach(const Point& at) const {
    const double few = std::min(problem_.k, problem_.n - problem_.k);
    return at.t * std::log(problem_.n / (kNothing * problem_.tol.mass * few));
  }

  Row<T> row_;
  Problem problem_;
  int tries_ = kTries;
  std::vector<T> scores_;
  T low_ = 0, high_ = 0;
  double over_ = 0;  // scores above all of these
};

// wanted: the mask is to be written. look: the row is known only from a sample, all of its scores may
// not be eligible.
template <typename T>
Answer iterate(const Row<T>& row, const Problem& problem, const Start& start, bool wanted,
               bool look = false) {
  Iteration it(problem, start.pivot, start.b, start.tau);
  Band<T> band(row, problem);
  bool all = look || it.soft(), write = false;
  int passes = 0;  // over all of the row
  while (true) {
    if (!all && !write) band.close(it.at);
    passes += !band.narrow();
    Sums sums = band.narrow() ? band.pass(it.at) : row.pass(it.at, all, write);
    all = it.wants_all(sums);
    if (all && !sums.all) ++passes, band.open(), sums = row.pass(it.at, true, false);
    const Point here = it.at;
    const Status status = it.step(sums);
    if (look && (sums.bad > 0 || sums.count != problem.n))
      return {sums.bad > 0 ? kNonFinite : kStalled, here, 0, 0, 0, false};
    look = false;
    const bool done = status != kStalled || it.passes >= kMaxPasses;
    if (done && !(wanted && band.narrow())) {
      if (wanted && !write) row.pass(here, false, true);
      return {status, here, it.mean_z, it.mean_p, passes, it.strained};
    }
    write = wanted && (done || (it.polish && !band.narrow()));
    if (band.narrow() && (done || !band.holds(it.at))) band.open();
  }
}

// A start for a long row, from a sample of it that would hold k of its scores above the barrier. The
// sample knows that count only to sqrt(k (1-a)): a temperature that leaves fewer scores undecided is
// no start for the row.
template <typename T>
bool start_from(const Row<T>& sample, double k, double target, bool fixed, Start* start) {
  const Stats stats = sample.stats();
  const double doubt = k * (1 - k / stats.count);
  if (stats.bad > 0 || stats.low >= stats.high || !(doubt >= kMinDoubt)) return false;
  const double hardest = std::log(std::sqrt(doubt) - 1);
  Problem rough{stats.count, k, fixed ? hardest : std::min(target, hardest), false, tolerance<T>()};
  rough.tol.mass = 1e-3, rough.tol.hardness = 1e-3;
  Answer answer = iterate(sample, rough, counting_start(sample, rough, stats), false);
  *start = {answer.at.pivot, answer.at.b, std::log(answer.at.t)};
  if (fixed && target > start->tau) {
    rough.fixed = true, rough.target = target;
    answer = iterate(sample, rough, *start, false);
    *start = {answer.at.pivot, answer.at.b, target};
  }
  return true;
}

// The same from one score in kSampleRatio.
template <typename T>
bool sample_start(const Row<T>& row, const Problem& problem, Start* start) {
  const int64_t size = std::max(kMinSample, row.n / kSampleRatio);
  std::vector<T> sample(size);
  for (int64_t i = 0; i < size; ++i) sample[i] = row.scores[i * row.n / size];
  const double k = problem.k * static_cast<double>(size) / static_cast<double>(row.n);
  return start_from(Row<T>{sample.data(), nullptr, nullptr, size, nullptr}, k, problem.target,
                    problem.fixed, start);
}

// Where the hardness hardly depends on the temperature, its rounding in float is a large error of t,
// and shows in the mask; where equal scores share the mass, that of their sum may be too large to end
// on: the answer is found anew in double.
inline void refine(const Row<double>&, Problem, Answer*) {}

inline void refine(const Row<float>& row, Problem problem, Answer* answer) {
  const bool doubtful = answer->status == kStalled || (answer->strained && answer->status == kConverged);
  if (!doubtful || problem.n > kLong || row.n > 16 * kLong) return;
  std::vector<double> scores(row.scores, row.scores + row.n), mask(row.n);
  problem.tol = tolerance<double>();
  const Start start{answer->at.pivot, answer->at.b, std::log(answer->at.t)};
  const Row<double> wide{scores.data(), nullptr, mask.data(), row.n, row.team};
  const Answer better = iterate(wide, problem, start, true);
  // Of a temperature whose inverse is no float, there is no gradient in float.
  if (better.status == kStalled || better.at.t * std::numeric_limits<float>::max() < 1) return;
  const int passes = answer->passes + better.passes;
  *answer = better, answer->passes = passes;
  int64_t i = 0;
  row.fill([&](float) { return static_cast<float>(mask[i++]); });
}

template <typename T>
Answer solve_row(const Row<T>& row, double k, double hardness, bool fixed) {
  const bool uniform = fixed ? hardness == kInf : hardness == 0;
  const bool binary = fixed ? hardness == 0 : hardness == 1;
  if (!(k >= 0) || !(hardness >= 0) || (!fixed && hardness > 1)) return non_finite(row);
  const double target = fixed ? std::log(hardness) : std::log(hardness) - std::log1p(-hardness);
  Problem problem{static_cast<double>(row.n), k, target, fixed, tolerance<T>()};
  Start start;
  if (row.n > kLong && !uniform && !binary && k > 0 && k < problem.n &&
      sample_start(row, problem, &start)) {
    const Answer answer = iterate(row, problem, start, true, true);
    if (answer.passes > 0) return answer;
  }
  const Stats look = row.stats();
  problem.n = look.count;
  if (look.bad > 0) return non_finite(row);
  if (k > look.count) return level(row, kInfeasible, 1);
  if (binary || k == 0 || k == look.count) return hard(row, k);
  if (uniform) return level(row, kUniform, k / look.count);
  if (look.low >= look.high) return level(row, kConstant, k / look.count);
  Answer answer = iterate(row, problem, counting_start(row, problem, look), true);
  refine(row, problem, &answer);
  return answer;
}

}  // namespace
}  // namespace laprune
