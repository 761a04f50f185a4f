// The operator in the browser: masks of mass k and hardness gamma, LapSum, and their theory.
// No dependencies; tested against the Python library on the same inputs.
//
// Scores are sorted once. At a temperature t the barrier then has a closed form (inside a gap the
// mass is a quadratic in exp(b/t)), so only log t is left to find: the root of
//   log C - log V - logit(gamma),   C = sum (p - k/n)^2,   V = sum p (1 - p),
// which falls from the sharp end to the diffuse one.
(function (root) {
  "use strict";

  // Root of a falling function by false position in its Illinois form, bracketed by growing steps.
  function fallingRoot(f, start, step, tolerance) {
    let lo = start, flo = f(lo);
    if (flo === 0) return lo;
    let hi = lo, fhi = flo;
    const sign = flo > 0 ? 1 : -1;
    for (let i = 0; sign > 0 ? fhi > 0 : flo < 0; i++) {
      if (i > 60) return NaN;
      if (sign > 0) { lo = hi; flo = fhi; hi += step; fhi = f(hi); }
      else { hi = lo; fhi = flo; lo -= step; flo = f(lo); }
      step *= 2;
    }
    let side = 0;
    for (let i = 0; i < 200 && hi - lo > tolerance * Math.max(1, Math.abs(lo)); i++) {
      const finite = Number.isFinite(flo) && Number.isFinite(fhi);
      let x = finite && i % 8 !== 7 ? (lo * fhi - hi * flo) / (fhi - flo) : (lo + hi) / 2;
      if (!(x > lo && x < hi)) x = (lo + hi) / 2;
      const y = f(x);
      if (y === 0) return x;
      if (y > 0) {
        lo = x; flo = y;
        if (side === 1) fhi /= 2;
        side = 1;
      } else {
        hi = x; fhi = y;
        if (side === -1) flo /= 2;
        side = -1;
      }
    }
    return (lo + hi) / 2;
  }

  // The barrier of mass k at temperature t for scores that fall: {pivot, offset}, b their sum.
  // Measured from a neighbouring score, b keeps its digits however far the scores lie from zero.
  function barrier(x, k, t) {
    const n = x.length;
    const above = new Float64Array(n + 1); // sum over the j largest of exp(-(x_i - x_j)/t)
    const below = new Float64Array(n + 1); // sum over the others of exp((x_i - x_{j+1})/t)
    for (let j = 1; j <= n; j++)
      above[j] = 1 + (j > 1 ? above[j - 1] * Math.exp(-(x[j - 2] - x[j - 1]) / t) : 0);
    for (let j = n - 1; j >= 0; j--)
      below[j] = 1 + (j < n - 1 ? below[j + 1] * Math.exp(-(x[j] - x[j + 1]) / t) : 0);
    // With b at the j-th score the mass grows with j: how many scores lie above the barrier?
    let j = 0, end = n;
    while (j < end) {
      const m = (j + end) >> 1;
      const excess = m + 1 - k - above[m + 1] / 2 + (below[m] - 1) / 2;
      if (excess <= 0) j = m + 1; else end = m;
    }
    const d = k - j;
    const gap = j > 0 && j < n ? (x[j - 1] - x[j]) / t : Infinity;
    const A = above[j], B = below[j], product = A * B * Math.exp(-gap);
    const rest = Math.abs(d) + Math.sqrt(d * d + product);
    if (d === 0) return { pivot: x[j], offset: (t * (gap + Math.log(B / A))) / 2 };
    if (d > 0) return { pivot: x[j], offset: t * Math.log(B / rest) };
    return { pivot: x[j - 1], offset: -t * Math.log(A / rest) };
  }

  // sigma((x - b)/t), said through q = min(p, 1 - p).
  function value(x, b, t) {
    const z = (x - b.pivot - b.offset) / t;
    const q = 0.5 * Math.exp(-Math.abs(z));
    return z > 0 ? 1 - q : q;
  }

  function logHardness(x, k, b, t) {
    const a = k / x.length;
    let C = 0, V = 0;
    for (const score of x) {
      const z = (score - b.pivot - b.offset) / t;
      const q = 0.5 * Math.exp(-Math.abs(z));
      const p = z > 0 ? 1 - q : q;
      C += (p - a) * (p - a);
      V += q * (1 - q);
    }
    return Math.log(C) - Math.log(V);
  }

  // The mask as t -> 0 for scores that fall: scores equal to the last one taken share what is left.
  function sharpest(x, k) {
    const last = x[Math.ceil(k) - 1];
    let more = 0, equal = 0;
    for (const score of x) { more += score > last; equal += score === last; }
    const share = (k - more) / equal;
    return x.map((score) => (score > last ? 1 : score === last ? share : 0));
  }

  function hardest(x, k) {
    return x.map((_, i) => Math.min(Math.max(k - i, 0), 1));
  }

  // What a mask is: mass, hardness, and the fractions within eps of 0 and of 1.
  function measure(p, eps) {
    let mass = 0, zero = 0, one = 0;
    for (const v of p) { mass += v; zero += v < eps; one += v > 1 - eps; }
    const mean = mass / p.length;
    let C = 0, V = 0;
    for (const v of p) { C += (v - mean) * (v - mean); V += v * (1 - v); }
    return { mass, gamma: C / (C + V), zero: zero / p.length, one: one / p.length };
  }

  function ranked(scores) {
    const order = Array.from(scores.keys());
    order.sort((i, j) => scores[j] - scores[i] || i - j);
    return { order, x: order.map((i) => scores[i]) };
  }

  function unranked(order, p) {
    const out = new Array(p.length);
    order.forEach((i, rank) => { out[i] = p[rank]; });
    return out;
  }

  // {mask, barrier, temperature, status} of one row of finite scores.
  function solve(scores, k, gamma) {
    const { order, x } = ranked(scores);
    const n = x.length;
    const answer = (p, b, t, status) =>
      ({ mask: unranked(order, p), barrier: b, temperature: t, status });
    if (gamma === 1 || k === 0 || k === n)
      return answer(hardest(x, k), x[Math.max(Math.ceil(k) - 1, 0)], 0, "HARD");
    if (gamma === 0) return answer(x.map(() => k / n), NaN, Infinity, "UNIFORM");
    if (x[0] === x[n - 1]) return answer(x.map(() => k / n), NaN, Infinity, "CONSTANT");
    const limit = sharpest(x, k);
    const most = measure(limit, 0.5).gamma;
    if (gamma >= most && most < 1)
      return answer(limit, x[Math.ceil(k) - 1], 0, "TIED");
    const target = Math.log(gamma) - Math.log1p(-gamma);
    const residual = (tau) => {
      const t = Math.exp(tau);
      return logHardness(x, k, barrier(x, k, t), t) - target;
    };
    let width = 0;
    for (const score of x) width += Math.abs(score - x[n >> 1]) / n;
    const t = Math.exp(fallingRoot(residual, Math.log(width || x[0] - x[n - 1]), 1, 1e-15));
    const b = barrier(x, k, t);
    return answer(x.map((score) => value(score, b, t)), b.pivot + b.offset, t, "CONVERGED");
  }

  // The mask of mass k at a fixed temperature.
  function lapsum(scores, k, t) {
    const { order, x } = ranked(scores);
    if (k === 0 || k === x.length) return unranked(order, hardest(x, k));
    const b = barrier(x, k, t);
    return unranked(order, x.map((score) => value(score, b, t)));
  }

  // The least fraction below eps of any mask with mean a and hardness gamma.
  function floor(a, gamma, eps) {
    if (1 - eps < (1 - a) * (1 - gamma)) {
      const gap = (Math.max(eps, a) - a) ** 2;
      return gap === 0 ? 0 : gap / (gap + a * (1 - a) * gamma);
    }
    return (1 - a) * Math.max(0, 1 - (a * (1 - gamma)) / eps);
  }

  // Gauss-Legendre nodes and weights by Newton's method on the polynomial.
  function gauss(n) {
    const nodes = [], weights = [];
    for (let i = 1; i <= n; i++) {
      let x = Math.cos((Math.PI * (i - 0.25)) / (n + 0.5)), slope = 1;
      for (let step = 0; step < 20; step++) {
        let p0 = 1, p1 = x;
        for (let m = 2; m <= n; m++) [p0, p1] = [p1, ((2 * m - 1) * x * p1 - (m - 1) * p0) / m];
        slope = (n * (x * p1 - p0)) / (x * x - 1);
        x -= p1 / slope;
      }
      nodes.push(x);
      weights.push(2 / ((1 - x * x) * slope * slope));
    }
    return { nodes, weights };
  }
  const GAUSS = gauss(16);

  function steps(from, to, step) {
    const out = [];
    for (let x = from; x <= to + step / 2; x += step) out.push(x);
    return out;
  }

  function powers(largest) {
    const out = [0];
    for (let x = 1 / 16; x <= largest; x *= 2) out.push(-x, x);
    return out.sort((a, b) => a - b);
  }

  const normalPdf = (x) => Math.exp((-x * x) / 2) / Math.sqrt(2 * Math.PI);
  const NEVER_ZERO = 1e-300;

  // Score distributions: the density, panels on which it is smooth, and a draw from it.
  const DISTRIBUTIONS = {
    gaussian: {
      label: "Gaussian",
      pdf: normalPdf,
      edges: steps(-14, 14, 0.5),
      draw: (u) => normal(u),
    },
    laplace: {
      label: "Laplace",
      pdf: (x) => Math.exp(-Math.abs(x)) / 2,
      edges: steps(-60, 60, 1),
      draw: (u) => { const v = u() - 0.5; return -Math.sign(v) * Math.log1p(-2 * Math.abs(v)); },
    },
    uniform: {
      label: "uniform",
      pdf: (x) => (x >= 0 && x <= 1 ? 1 : 0),
      edges: [0, 0.5, 1],
      draw: (u) => u(),
    },
    student: {
      label: "Student t, 3 degrees",
      pdf: (x) => (6 * Math.sqrt(3)) / (Math.PI * (3 + x * x) ** 2),
      edges: powers(2 ** 40),
      draw: (u) => {
        const z = normal(u);
        const chi = normal(u) ** 2 + normal(u) ** 2 + normal(u) ** 2;
        return z / Math.sqrt(chi / 3);
      },
    },
    exponential: {
      label: "exponential",
      pdf: (x) => (x >= 0 ? Math.exp(-x) : 0),
      edges: steps(0, 60, 1),
      draw: (u) => -Math.log1p(-u()),
    },
    peaks: {
      label: "two peaks",
      pdf: (x) => 0.7 * 5 * normalPdf(5 * x) + 0.3 * 5 * normalPdf(5 * (x - 4)),
      edges: [...steps(-2, 2, 0.1), ...steps(2.1, 6, 0.1)],
      draw: (u) => (u() < 0.3 ? 4 : 0) + normal(u) / 5,
    },
  };

  function normal(u) {
    return Math.sqrt(-2 * Math.log(1 - u())) * Math.cos(2 * Math.PI * u());
  }

  // A small generator with a seed (mulberry32), so that a picture can be seen again.
  function generator(seed) {
    let s = seed >>> 0;
    return () => {
      s = (s + 0x6d2b79f5) >>> 0;
      let z = Math.imul(s ^ (s >>> 15), 1 | s);
      z = (z + Math.imul(z ^ (z >>> 7), 61 | z)) ^ z;
      return ((z ^ (z >>> 14)) >>> 0) / 4294967296;
    };
  }

  function draw(name, n, seed) {
    const u = generator(seed);
    return Array.from({ length: n }, () => DISTRIBUTIONS[name].draw(u));
  }

  // Integrals over a distribution of functions of x - b that bend at b on the scale t.
  function integrate(distribution, b, t, visit) {
    const { pdf, edges } = distribution;
    const low = edges[0], high = edges[edges.length - 1];
    const cuts = edges.slice();
    for (let i = -10; i <= 10; i++) cuts.push(Math.min(Math.max(b + 4 * i * t, low), high));
    cuts.sort((x, y) => x - y);
    for (let i = 0; i + 1 < cuts.length; i++) {
      const half = (cuts[i + 1] - cuts[i]) / 2, middle = (cuts[i + 1] + cuts[i]) / 2;
      if (!(half > 0)) continue;
      for (let j = 0; j < GAUSS.nodes.length; j++) {
        const x = middle + half * GAUSS.nodes[j];
        visit(x, half * GAUSS.weights[j] * pdf(x));
      }
    }
  }

  function moments(distribution, b, t) {
    let mean = 0, rest = 0, V = 0, second = 0;
    integrate(distribution, b, t, (x, mass) => {
      const z = (x - b) / t, q = 0.5 * Math.exp(-Math.abs(z));
      mean += mass * (z > 0 ? 1 - q : q);
      rest += mass * (z > 0 ? q : 1 - q);
      V += mass * q * (1 - q);
    });
    integrate(distribution, b, t, (x, mass) => {
      const z = (x - b) / t, q = 0.5 * Math.exp(-Math.abs(z));
      const deviation = z > 0 ? rest - q : q - mean;
      second += mass * deviation * deviation;
    });
    const log = (v) => Math.log(Math.max(v, NEVER_ZERO));
    return { logOdds: log(mean) - log(rest), logHardness: log(second) - log(V) };
  }

  function below(distribution, x) {
    let mass = 0;
    integrate(distribution, x, 0, (y, w) => { if (y < x) mass += w; });
    return mass;
  }

  // The population mask of mean a over a distribution, as a function of log t.
  function population(name, a) {
    const distribution = DISTRIBUTIONS[name];
    const odds = Math.log(a) - Math.log1p(-a);
    const quantile = fallingRoot((x) => 1 - a - below(distribution, x), 0, 1, 1e-13);
    const barrier = (tau) => {
      const t = Math.exp(tau);
      const off = (y) => moments(distribution, quantile + t * y, t).logOdds - odds;
      return quantile + t * fallingRoot(off, 0, 1, 1e-13);
    };
    const logHardness = (tau) => moments(distribution, barrier(tau), Math.exp(tau)).logHardness;
    const fractions = (tau, eps) => {
      const b = barrier(tau), reach = Math.exp(tau) * Math.log(2 * eps);
      // A mass of 1 may come out a rounding above it.
      const share = (x) => Math.min(below(distribution, x), 1);
      return { zero: share(b + reach), one: 1 - share(b - reach) };
    };
    const solve = (gamma) => {
      const target = Math.log(gamma) - Math.log1p(-gamma);
      return fallingRoot((tau) => logHardness(tau) - target, 0, 1, 1e-12);
    };
    return { quantile, barrier, logHardness, fractions, solve };
  }

  // The population solution: barrier, temperature and the fractions within eps of 0 and of 1.
  function meanField(name, a, gamma, eps) {
    if (gamma === 0)
      return { barrier: NaN, temperature: Infinity, zero: +(a < eps), one: +(1 - a < eps) };
    const field = population(name, a);
    if (gamma === 1) return { barrier: field.quantile, temperature: 0, zero: 1 - a, one: a };
    const tau = field.solve(gamma);
    return { barrier: field.barrier(tau), temperature: Math.exp(tau), ...field.fractions(tau, eps) };
  }

  // The least gamma from which on the fraction within eps of 0 or 1 is `target` < 1. For every
  // distribution 1 - fraction <= a (1-a) (1-gamma) / (eps (1-eps)): start there and walk down.
  function gammaFor(name, a, target, eps) {
    const enough = 1 - ((1 - target) * eps * (1 - eps)) / (a * (1 - a));
    if (target <= 0 || enough < 1e-12) return 0;
    const field = population(name, a);
    const hardness = (tau) => 1 / (1 + Math.exp(-field.logHardness(tau)));
    const excess = (tau) => {
      const { zero, one } = field.fractions(tau, eps);
      return zero + one - target;
    };
    let tau = field.solve(enough);
    while (excess(tau + 0.5) >= 0) {
      tau += 0.5;
      if (hardness(tau) < 1e-9) return Math.min(a, 1 - a) < eps ? 0 : hardness(tau);
    }
    return hardness(fallingRoot(excess, tau, 0.5, 1e-13));
  }

  const api = { solve, lapsum, measure, floor, meanField, gammaFor, draw, DISTRIBUTIONS };
  if (typeof module !== "undefined") module.exports = api;
  else root.laprune = api;
})(globalThis);
