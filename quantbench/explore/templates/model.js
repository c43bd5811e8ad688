// Evaluates the packed latency models (quantbench/explore/evaluator.py). Their code is generated from
// quantbench/latency; written here are the walk through forests, the Gaussian process and the draw of
// experts' rows, which tests/explore compares with Python.
'use strict';

// Makes the functions of a model from its text.
function functionsOf(data, view, process) {
  const text = new TextDecoder().decode(view(Uint8Array, data.code));
  const forests = (data.forests || []).map(forest => walker(forest, view));
  return new Function('forests', 'process', 'argmin', 'smallest', text)(forests, process, argmin, smallest);
}

function argmin(values) {
  let best = 0;
  for (let i = 1; i < values.length; i++) if (values[i] < values[best]) best = i;
  return best;
}

const smallest = (values, n) => values.slice().sort()[n];

// Remembers what `make` returns for a key.
function remember(known, key, make) {
  let found = known.get(key);
  if (!found) {
    if (known.size > 60000) known.clear();
    known.set(key, found = make());
  }
  return found;
}

// Returns the function from features to the mean and the variance of the trees of a forest.
function walker(data, view) {
  const LEAF = 255, feature = view(Uint8Array, data.feature), roots = view(Int32Array, data.roots);
  const thresholds = view(Float32Array, data.threshold), values = view(Float32Array, data.value);
  const number = new Float32Array(feature.length), right = new Int32Array(feature.length);
  const starts = new Set(roots), waiting = [];
  let inner = 0, leaf = 0;
  for (let node = 0; node < feature.length; node++) {
    if (!starts.has(node) && feature[node - 1] === LEAF) right[waiting.pop()] = node;
    if (feature[node] === LEAF) number[node] = values[leaf++];
    else {
      number[node] = thresholds[inner++];
      waiting.push(node);
    }
  }
  return columns => {
    const x = Float32Array.from(columns);
    let sum = 0, squares = 0;
    for (const root of roots) {
      let node = root, of;
      while ((of = feature[node]) !== LEAF) node = x[of] > number[node] ? right[node] : node + 1;
      sum += number[node];
      squares += number[node] ** 2;
    }
    const mean = sum / roots.length;
    return [mean, Math.max(0, squares / roots.length - mean ** 2)];
  };
}

class GemmModel {
  constructor(data, view) {
    Object.assign(this, data, {run: functionsOf(data, view), known: new Map(), measured: new Map()});
    this.kernels = view(Float64Array, data.kernels);
    // Times that were measured, by m, n and k; three for each layout.
    const sizes = view(Int32Array, data.measured.sizes), times = view(Float32Array, data.measured.times);
    for (let row = 0; row < sizes.length / 3; row++) {
      this.measured.set(sizes.subarray(3 * row, 3 * row + 3).join(), times.subarray(9 * row, 9 * row + 9));
    }
  }

  // Returns {us, low, high, kernel} of one product; layout: an index (nn, nt, tn).
  predict(m, n, k, batch = 1, layout = 0) {
    return remember(this.known, `${m},${n},${k},${batch},${layout}`, () => {
      const run = k < this.least_k ? this.run.short : this.run.times;
      const measured = batch === 1 && this.measured.get(`${m},${n},${k}`);
      const [us, low, high, kernel] = run(m, n, k, batch, layout);
      if (!measured) return {us, low, high, kernel};
      return {us: measured[3 * layout], low: measured[3 * layout + 1], high: measured[3 * layout + 2], kernel};
    });
  }

  // Returns {blockM, blockN, splitK, held} of a kernel.
  tile(kernel) {
    const [blockM, blockN, splitK, held] = this.kernels.subarray(4 * kernel, 4 * kernel + 4);
    return {blockM, blockN, splitK, held};
  }
}

class AttentionModel {
  constructor(data, view) {
    const process = data.process && new GaussianProcess(data.process, view);
    this.run = functionsOf(data, view, features => process.predict(features));
    this.known = new Map();
  }

  // Returns {us, low, high} of causal attention of `seq` tokens.
  predict(batch, heads, kvHeads, seq, headDim, backward) {
    return remember(this.known, [batch, heads, kvHeads, seq, headDim, backward].join(), () => {
      const run = backward ? this.run.backward : this.run.forward;
      const [us, low, high] = run(batch, heads, kvHeads, seq, headDim);
      return {us, low, high};
    });
  }
}

// A Gaussian process with a Matérn 3/2 kernel, conditioned when it is first asked.
class GaussianProcess {
  constructor(data, view) {
    Object.assign(this, data);
    for (const name of ['features', 'targets', 'shift', 'spread', 'length_scales']) {
      this[name] = view(Float64Array, data[name]);
    }
  }

  prepare() {
    const rows = this.targets.length, width = this.shift.length, L = new Float64Array(rows * rows);
    this.scaled = this.features.map((x, i) => x / this.length_scales[i % width]);
    for (let i = 0; i < rows; i++) {
      for (let j = 0; j <= i; j++) {
        let sum = this.kernel(this.scaled, i * width, j * width);
        if (i === j) sum += this.noise + 1e-10 * this.amplitude;
        for (let d = 0; d < j; d++) sum -= L[i * rows + d] * L[j * rows + d];
        L[i * rows + j] = i === j ? Math.sqrt(sum) : sum / L[j * rows + j];
      }
    }
    this.weights = this.solve(L, Float64Array.from(this.targets));
    for (let i = rows - 1; i >= 0; i--) {
      this.weights[i] /= L[i * rows + i];
      for (let j = 0; j < i; j++) this.weights[j] -= L[i * rows + j] * this.weights[i];
    }
    // Single precision: the deviation changes by less than 1e-5 of itself.
    this.factor = new Float32Array(L);
  }

  solve(L, y) {
    const rows = y.length;
    for (let i = 0; i < rows; i++) {
      let sum = y[i];
      for (let j = 0, at = i * rows; j < i; j++, at++) sum -= L[at] * y[j];
      y[i] = sum / L[i * rows + i];
    }
    return y;
  }

  kernel(left, at, other) {
    let squared = 0;
    for (let d = 0; d < this.shift.length; d++) squared += (left[at + d] - this.scaled[other + d]) ** 2;
    const distance = Math.sqrt(3 * squared);
    return this.amplitude * (1 + distance) * Math.exp(-distance);
  }

  // Returns the mean and the standard deviation at raw features.
  predict(features) {
    if (!this.weights) this.prepare();
    const x = features.map((value, i) => (value - this.shift[i]) / this.spread[i] / this.length_scales[i]);
    const cross = this.targets.map((_, i) => this.kernel(x, 0, i * x.length));
    const mean = cross.reduce((sum, value, i) => sum + value * this.weights[i], this.centre);
    const explained = this.solve(this.factor, cross).reduce((sum, value) => sum + value * value, 0);
    return [mean, Math.sqrt(Math.max(this.amplitude - explained, 0))];
  }
}

// Megatron's softmax of unfused attention; separate kernels move `by` times the bytes of the fused one.
class SoftmaxModel {
  constructor(data, view) {
    this.run = functionsOf(data, view);
  }

  predict(bytes, rows, columns, by) {
    const [us, low, high] = this.run.times(bytes, rows, columns);
    return {us: by * us, low: by * low, high: by * high, fused: us};
  }
}

// The routed experts of a layer, on the GPU with the most rows.
class ExpertsModel {
  constructor(data, view) {
    Object.assign(this, data, {run: functionsOf(data, view), known: new Map()});
  }

  // latency.moe_features.fewer_gpus
  fewerGpus({tokens, ep}) {
    for (let f = 1; f < ep; f++) if (ep % f === 0 && tokens <= f * this.most_tokens) return f;
    return ep;
  }

  predict(op, draws) {
    const {tokens, hidden, expert_ffn, num_experts, top_k, gated, tp, ep, distribution} = op;
    const key = [tokens, hidden, expert_ffn, num_experts, top_k, gated, tp, ep, distribution].join();
    return remember(this.known, key, () => {
      const ffn = expert_ffn / tp, fewer = this.fewerGpus(op), width = gated ? 2 * ffn : ffn;
      const [us, low, high] = this.run.times(tokens / fewer, hidden, expert_ffn, ffn, width,
        num_experts / fewer, top_k, ep / fewer, ...expertLoads(op, this.tiles, draws));
      return {us, low, high};
    });
  }
}

const total = list => list.reduce((sum, one) => sum + one, 0);
const exponentOf = named => named === 'balanced' ? 0 : Number(named.slice('power_law_'.length));
const evenly = (rows, experts) => Array.from({length: experts},
  (_, e) => Math.floor((e + 1) * rows / experts) - Math.floor(e * rows / experts));

// Rows of experts by quantiles of a power law (workload.moe), before what rounding leaves over.
function powerLaw(shares, exponent, tokens, rows) {
  const [low, high] = rows > shares.length ? [1, 0.8 * tokens] : [0.01, 2], power = 1 - exponent;
  const weights = shares.map(share => ((high ** power - low ** power) * share + low ** power) ** (1 / power));
  const scale = rows / total(weights);
  return weights.map(weight => Math.min(roundEven(weight * scale), tokens));
}

// Rows, experts with rows, most and median rows of an expert, and tiles along the rows of each size, on the
// GPU with the most rows (latency.moe_features.ExpertLoads): means over draws of a power law.
function expertLoads({tokens, num_experts: experts, top_k, ep, distribution}, tiles, draws) {
  const all = tokens * top_k, exponent = exponentOf(distribution), local = experts / ep, every = [];
  for (let draw = 0; draw < (exponent ? 4 : 1); draw++) {
    const shares = draws.slice(draw * experts, (draw + 1) * experts);
    const rows = exponent ? powerLaw(shares, exponent, tokens, all) : evenly(all, experts);
    const missing = all - total(rows);
    let busiest = null;
    for (let rank = 0; rank < ep; rank++) {
      const sorted = rows.slice(rank * local, (rank + 1) * local).sort((a, b) => a - b);
      const each = Math.floor(Math.abs(missing) / ep) + (rank < Math.abs(missing) % ep);
      const held = sorted.map((n, i) => Math.max(0, missing > 0 ? n + (i < each) : n - (local - 1 - i < each)));
      if (!busiest || total(held) > total(busiest)) busiest = held;
    }
    busiest.sort((a, b) => a - b);
    const half = (local - 1) / 2, median = (busiest[Math.floor(half)] + busiest[Math.ceil(half)]) / 2;
    every.push([total(busiest), busiest.filter(n => n > 0).length, busiest[local - 1], median,
      ...tiles.map(tile => total(busiest.map(n => Math.ceil(n / tile))))]);
  }
  return every[0].map((_, i) => total(every.map(one => one[i])) / every.length);
}

// Tokens of each expert (workload.MoE.tokens_per_expert). draws: the first numbers of Python's random.Random(0).
function tokensPerExpert({tokens, num_experts: experts, top_k, ep, distribution}, draws) {
  const rows = tokens * top_k, exponent = exponentOf(distribution), local = experts / ep;
  if (!exponent) return evenly(rows, experts);
  const found = powerLaw(draws.slice(0, experts), exponent, tokens, rows);
  let missing = rows - total(found);
  while (missing) {
    for (let rank = 0; rank < ep && missing; rank++) {
      let pick = rank * local;
      for (let e = pick; e < (rank + 1) * local; e++) {
        if (missing > 0 ? found[e] < found[pick] : found[e] > found[pick]) pick = e;
      }
      const step = missing > 0 ? Math.min(1, tokens - found[pick]) : -Math.min(1, found[pick]);
      found[pick] += step;
      missing -= step;
    }
  }
  return found;
}

function roundEven(x) {
  const r = Math.round(x);
  return Math.abs(x % 1) === 0.5 && r % 2 ? r - 1 : r;
}
