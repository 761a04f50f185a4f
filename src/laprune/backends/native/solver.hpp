// The two-equation solver, one row at a time: sums of a pass in, the next (b, t) out.
// The mathematics, with the same names, is explained in reference.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace laprune {

constexpr double kInf = std::numeric_limits<double>::infinity();

// The values of laprune.Status.
enum Status : int32_t { kConverged, kUniform, kHard, kConstant, kTied, kInfeasible, kNonFinite, kStalled };

// What one read of the row yields at (b, t). "lo" is z <= 0, "hi" is z > 0, w = |z|.
struct Sums {
  double above_count = 0;             // N, the scores above the barrier
  double q_lo = 0, q_hi = 0;          // sum q
  double qw_lo = 0, qw_hi = 0;        // sum q w
  double qq_lo = 0, qq_hi = 0;        // sum q^2
  double qqw = 0;                     // sum q^2 w
  bool all = true;                    // whether what follows was asked for
  double count = 0, bad = 0;          // eligible scores; NaN or +inf
  double spread = 0;                  // sum (p - a)^2
  double below = -kInf, above = kInf; // nearest scores on both sides of the barrier
  double gap = kInf;                  // distance from the pivot to the nearest other score

  void add(const Sums& o) {
    above_count += o.above_count;
    q_lo += o.q_lo, q_hi += o.q_hi, qw_lo += o.qw_lo, qw_hi += o.qw_hi;
    qq_lo += o.qq_lo, qq_hi += o.qq_hi, qqw += o.qqw;
    count += o.count, bad += o.bad, spread += o.spread;
    below = std::max(below, o.below), above = std::min(above, o.above), gap = std::min(gap, o.gap);
  }
};

// Where a pass is evaluated: z = (r - pivot - b) / t.
struct Point {
  double pivot, b, t, a;
};

struct Tolerance {
  double mass, hardness;  // error of the mass relative to min(k, n-k); of the log odds of gamma
  double max_z;           // |z| is cut here, before exp underflows
};

struct Problem {
  double n, k;
  double target;  // logit(gamma), or log(temperature) when `fixed`
  bool fixed;
  Tolerance tol;
};

constexpr int kMaxPasses = 100;
constexpr int kPatience = 16;        // passes after which a temperature step needs a solved barrier
constexpr double kMaxStep = 3;       // largest step in log t
constexpr double kMaskTolerance = 1e-6;  // of an entry, from each of the two
constexpr double kNoise = 3e-7;      // of e2, where scores are float
constexpr double kSaturated = 45;    // exp(-45) is nothing beside 1 in any dtype
constexpr double kSparse = 3e-10;    // less q per score on a side: no score there for kSaturated / 2
constexpr double kSoft = -1;         // below this logit(gamma), sum (p - a)^2 is summed by itself

class Iteration {
 public:
  Point at;
  double mean_z = 0, mean_p = 0;  // weighted by q: what the gradient is centred on
  int passes = 0;
  bool polish = false;  // the next point should be the answer
  bool strained = false;  // the answer is less certain than float can be

  Iteration(const Problem& problem, double pivot, double b, double tau)
      : at{pivot, b, std::exp(tau), problem.k / problem.n}, problem_(problem), tau_(tau) {}

  double tau() const { return tau_; }

  // Whether no pass at any point will do without all sums.
  bool soft() const { return !problem_.fixed && problem_.target < kSoft; }

  // Whether one at this point will not: few scores bear the weight, and where they lie says more.
  bool wants_all(const Sums& s) const {
    return soft() || lost_ || !(std::min(s.q_lo, s.q_hi) >= kSparse * problem_.n);
  }

  // Digest the sums at `at`. Returns kConverged or kTied when `at` is the answer, else moves `at`
  // and returns kStalled.
  Status step(const Sums& s);

 private:
  Problem problem_;
  double tau_;
  double tau_lo_ = -kInf, tau_hi_ = kInf;  // bracket of log t
  double b_lo_ = -kInf, b_hi_ = kInf;      // bracket of b at this t
  double stride_ = kInf;                   // size of the last step in log t
  int polished_ = 0;
  bool lost_ = false;                      // no score is known near the barrier to measure it from
  void move(double b, double tau, const Sums& s);
};

inline Status Iteration::step(const Sums& s) {
  ++passes;
  const double n = problem_.n, k = problem_.k, t = at.t;
  const double N = s.above_count;
  const double q_lo = s.q_lo, q_hi = s.q_hi, qw_lo = s.qw_lo, qw_hi = s.qw_hi;
  const double qq_lo = s.qq_lo, qq_hi = s.qq_hi, a = at.a, rest = 1 - at.a;
  const double q = q_lo + q_hi;

  // Budget: log P = log M. Derivatives are with respect to b/t and log t.
  const double P = q_lo + std::max(N - k, 0.0), M = q_hi + std::max(k - N, 0.0);
  const double excess = P - M;
  const double e1 = std::log(P / M);
  const double e1_b = -(q_lo / P + q_hi / M), e1_t = qw_lo / P - qw_hi / M;

  // Hardness: log C - log V = logit gamma, reduced to the barrier that holds the budget.
  double residual, slope, e2;
  if (problem_.fixed) {
    residual = e2 = problem_.target - tau_, slope = -1;
  } else {
    const double mean = k / n + excess / n;
    const double spread = s.all ? s.spread
                                : qq_lo + a * (a * (n - N) - 2 * q_lo) + qq_hi + rest * (rest * N - 2 * q_hi);
    const double C = std::max(spread - excess * excess / n, std::numeric_limits<double>::min());
    const double V = q - qq_lo - qq_hi;
    const double c_b = -2 * ((qq_lo - mean * q_lo) + ((1 - mean) * q_hi - qq_hi));
    const double c_t = 2 * (s.qqw - mean * qw_lo - (1 - mean) * qw_hi);
    const double v_b = -((q_lo - 2 * qq_lo) - (q_hi - 2 * qq_hi)), v_t = qw_lo + qw_hi - 2 * s.qqw;
    const double e2_b = c_b / C - v_b / V, e2_t = c_t / C - v_t / V;
    e2 = std::log(C / V) - problem_.target;
    residual = e2 - e2_b * e1 / e1_b, slope = e2_t - e2_b * e1_t / e1_b;
  }
  mean_z = (qw_hi - qw_lo) / q;
  mean_p = (qq_lo + q_hi - qq_hi) / q;

  // Newton's step of the barrier alone, in units of t, and what it and that of log t, which takes
  // the barrier along, would still move an entry of the mask by.
  const double u = -e1 / e1_b;
  const double by_b = std::min(0.5, q) * std::abs(u);
  const double per_t = std::min(0.19, qw_lo + qw_hi) + std::min(0.5, q) * std::abs(mean_z);
  const double by_t = per_t * std::abs(residual) / std::max(-slope, 1e-3);
  const bool budget_holds =
      std::abs(excess) <= problem_.tol.mass * std::min(k, n - k) && by_b <= kMaskTolerance;
  const double close = problem_.fixed ? 0 : problem_.tol.hardness;  // a given temperature is kept
  strained = !problem_.fixed && per_t * kNoise > kMaskTolerance * -slope;
  if (budget_holds && std::abs(e2) <= close && by_t <= kMaskTolerance) return kConverged;
  // Rounding may keep a solved row from the last digit: after some tries, twice the error passes,
  // and the mass may err relative to k alone.
  polished_ += polish;
  strained = strained || polished_ > 4;
  if (polished_ > 4 && std::abs(excess) <= 2 * problem_.tol.mass * k && std::abs(e2) <= 2 * close)
    return kConverged;
  // All weight on one score, or on equal ones: a smaller t changes nothing any more.
  const bool pinned =
      s.all && t < s.gap / kSaturated && std::abs(at.b) < s.gap / 2 && e2 < 0 && N != k;
  if (pinned && budget_holds && !problem_.fixed) return kTied;

  // In a saturated gap a lower temperature changes nothing: straight to the given one.
  const double middle = 0.5 * ((s.below - at.pivot) + (s.above - at.pivot));
  const bool in_gap = s.all && N == k;
  if (problem_.fixed && in_gap && problem_.target <= tau_ && s.above - s.below > 2 * kSaturated * t) {
    b_lo_ = -kInf, b_hi_ = kInf, polish = false;
    move(middle, problem_.target, s);
    return kStalled;
  }
  // In the right gap V <= sqrt(k (n-k)) exp(-gap/2t): a t below this bound is too small.
  if (!problem_.fixed && in_gap) {
    const double reach = std::log(n / std::sqrt(k * (n - k))) + std::log1p(std::exp(problem_.target));
    const double bound = std::log((s.above - s.below) / (2 * reach));
    if (tau_ < bound) {
      tau_lo_ = std::max(tau_lo_, tau_);
      b_lo_ = -kInf, b_hi_ = kInf, polish = false;
      move(middle, bound, s);
      return kStalled;
    }
  }

  const double size = std::max(std::abs(e1), std::abs(residual));
  polish = 10 * size * size <= std::min(problem_.tol.mass, problem_.tol.hardness);

  const bool flat = slope > -0.2;
  const bool solved = std::abs(e1) <= std::max(1e-11, 0.1 * std::min(1.0, std::abs(residual))) &&
                      (!flat || std::abs(u) <= 0.003);
  const double newton = tau_ - residual / slope;
  const bool promising = !flat && newton > tau_lo_ && newton < tau_hi_ && passes < kPatience;
  const bool both = std::abs(e1) <= 1 && (problem_.fixed ? residual != 0 : !pinned) &&
                    (solved || promising);
  if (both) {
    const bool fine = std::abs(residual) <= 1e-7;
    if (solved && !fine) {
      if (residual > 0) tau_lo_ = std::max(tau_lo_, tau_);
      else tau_hi_ = std::min(tau_hi_, tau_);
      if (tau_lo_ >= tau_hi_) tau_lo_ = -kInf, tau_hi_ = kInf;
    }
    double d = slope < 0 ? -residual / slope : std::copysign(kMaxStep, residual);
    if (!pinned) {
      const double down = std::max(-kMaxStep, std::log(std::max(std::abs(u), 1e-15) / 3));
      d = std::min(std::max(d, down), kMaxStep);
    }
    double tau = tau_ + d;
    if (problem_.fixed && std::abs(problem_.target - tau) < 1e-9) tau = problem_.target;
    const bool bracketed = std::isfinite(tau_lo_) && std::isfinite(tau_hi_);
    // Steps that leave the bracket, or do not shrink inside it, bisect.
    if (!fine && bracketed &&
        !(tau > tau_lo_ && tau < tau_hi_ && std::abs(tau - tau_) <= 0.75 * stride_))
      tau = 0.5 * (tau_lo_ + tau_hi_);
    // A short step in t means little beside a long one in b.
    stride_ = std::max(std::abs(tau - tau_), std::abs(u));
    b_lo_ = -kInf, b_hi_ = kInf;
    // b is close to linear in t, at both ends; its own step is one in units of the new t.
    const double growth = std::expm1(tau - tau_);
    move(at.b + t * (u + (u - e1_t / e1_b) * growth), tau, s);
  } else {
    (excess > 0 ? b_lo_ : b_hi_) = at.b;
    double b = at.b + t * u;
    const double under = at.b - (s.below - at.pivot), over = (s.above - at.pivot) - at.b;
    if (s.all && std::min(under, over) > 0.9 * problem_.tol.max_z * t)
      b = excess > 0 ? at.b + over : at.b - under;
    const bool bracketed = std::isfinite(b_lo_) && std::isfinite(b_hi_);
    if (bracketed && !(b > b_lo_ && b < b_hi_)) b = 0.5 * (b_lo_ + b_hi_);
    move(b, tau_, s);
  }
  return kStalled;
}

// Keep b small beside t by measuring it from close by: from a score if they are known, and where
// scores are few, from the one that the barrier is at, on which all weight may come to rest.
inline void Iteration::move(double b, double tau, const Sums& s) {
  tau_ = tau;
  at.b = b, at.t = std::exp(tau);
  if (!s.all) {
    if (!(std::abs(b) > 2 * at.t)) return;
    lost_ = problem_.fixed;  // at a given temperature the barrier may lie far outside of the scores
    if (lost_) return;
    const double origin = at.pivot + b, shift = origin - at.pivot;  // scores may be an ulp apart
    at.pivot = origin, at.b -= shift, b_lo_ -= shift, b_hi_ -= shift;
    return;
  }
  lost_ = false;
  const double over = (s.above - at.pivot) - b, under = b - (s.below - at.pivot);
  const double pivot = over < under ? s.above : s.below;
  const double shift = pivot - at.pivot;
  const bool better = std::abs(b) > 2 * at.t && std::abs(b - shift) < 0.5 * std::abs(b);
  const bool at_score = s.above - s.below > 8 * at.t && std::abs(b - shift) <= 4 * at.t;
  if (!better && !at_score) return;
  at.pivot = pivot, at.b -= shift, b_lo_ -= shift, b_hi_ -= shift;
}

}  // namespace laprune
