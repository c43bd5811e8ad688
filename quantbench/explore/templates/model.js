// Evaluates the packed latency models (quantbench/explore/evaluator.py): the cost models are WebAssembly compiled from
// quantbench/latency; what is written here walks trees, conditions Gaussian processes and joins members, and is tested
// against Python on random shapes (tests/explore).

const EXACT_BLOCKS = 64, UNSEEN = Math.log(2), WIDEST_HEAD = 256;

// Makes a model of a class from packed data: `run` computes the numbers in `out`.
async function loadModel(Class, data, view) {
  const {instance} = await WebAssembly.instantiate(view(Uint8Array, data.wasm)), {times: run, memory} = instance.exports;
  return Object.assign(new Class(), data, {run, out: new Float64Array(memory.buffer), known: new Map()});
}

// Remembers what `make` returns for a key.
function remember(known, key, make) {
  let found = known.get(key);
  if (!found) {
    if (known.size > 60000) known.clear();
    known.set(key, found = make());
  }
  return found;
}

class GemmModel {
  static async load(data, view) {
    const model = await loadModel(GemmModel, data, view);
    model.kernels = view(Float64Array, data.kernels);
    model.members = data.members.map(member => ({...member, forest: member.forest && unpackForest(member.forest, view),
      x: new Float32Array(member.columns)}));
    // Times that were measured, by m, n, k and layout.
    const sizes = view(Int32Array, data.measured.sizes), times = view(Float32Array, data.measured.times);
    model.looked = new Map();
    for (let row = 0; row < sizes.length / 3; row++) {
      model.looked.set(sizes.subarray(3 * row, 3 * row + 3).join(), times.subarray(9 * row, 9 * row + 9));
    }
    return model;
  }

  // Returns {us, low, high, kernel} of one GEMM; sizes are whole numbers, layout an index (nn, nt, tn).
  predict(m, n, k, batch = 1, layout = 0) {
    return remember(this.known, `${m},${n},${k},${batch},${layout}`, () => {
      const looked = batch === 1 && this.looked.get(`${m},${n},${k}`), found = this.layouts ? this.fresh(m, n, k, batch, layout) : this.fresh(m, n, this.stored(m, k, layout), batch, -1);
      if (!looked) return found;
      const [us, low, high] = looked.subarray(3 * layout);
      return {...found, us, low, high};
    });
  }

  // Mirrors latency.gemm.inputs.k_as_stored; aligned: elements in 16 bytes, null for narrow formats.
  stored(m, k, layout) {
    const aligned = this.aligned;
    return layout === 2 && aligned ? k + ((m - k) % aligned + aligned) % aligned : k;
  }

  fresh(m, n, k, batch, layout) {
    const {logUs, variance, kernels} = this.raw(m, n, k, batch, layout);
    const peak = 2 * m * n * k * batch / this.flop_per_us;
    const us = Math.max(Math.exp(logUs), peak);
    const factor = Math.exp(this.factor * Math.sqrt(variance + this.floor ** 2));
    return {us, low: Math.max(us / factor, peak), high: us * factor, kernel: kernels[0]};
  }

  raw(m, n, k, batch, layout) {
    const deep = Math.max(k, this.least_k), out = this.out, members = this.members;
    this.run(m, n, deep, batch, layout);
    const logs = [], kernels = [];
    let within = 0, grown = 0, physics = 0;
    for (const member of members) {
      physics += out[member.at] / members.length;
      kernels.push(out[member.at + 1]);
      let log = out[member.at];
      if (member.forest) {
        const x = member.x;
        for (let i = 0; i < x.length; i++) x[i] = out[member.at + 2 + i];
        const [mean, variance] = walk(member.forest, x);
        log += Math.min(Math.max(mean, -member.most), member.most);
        within += variance;
        grown++;
      }
      logs.push(log);
    }
    const mean = logs.reduce((a, b) => a + b, 0) / logs.length;
    let variance = logs.reduce((a, b) => a + (b - mean) ** 2, 0) / logs.length;
    if (grown) variance += within / grown;
    let logUs = mean - variance;
    if (k < deep) {
      this.run(m, n, k, batch, layout);
      logUs += members.reduce((a, member) => a + out[member.at] / members.length, 0) - physics;
    }
    return {logUs, variance, kernels};
  }

  // Returns {blockM, blockN, splitK, held} of a kernel.
  tile(kernel) {
    const [blockM, blockN, splitK, held] = this.kernels.subarray(4 * kernel, 4 * kernel + 4);
    return {blockM, blockN, splitK, held};
  }
}

function unpackForest(data, view) {
  const LEAF = 255, feature = view(Uint8Array, data.feature), roots = view(Int32Array, data.roots);
  const thresholds = view(Float32Array, data.threshold), values = view(Float32Array, data.value);
  const number = new Float32Array(feature.length), right = new Int32Array(feature.length), waiting = [];
  const starts = new Set(roots);
  let inner = 0, leaf = 0;
  for (let node = 0; node < feature.length; node++) {
    if (!starts.has(node) && feature[node - 1] === LEAF) right[waiting.pop()] = node;
    if (feature[node] === LEAF) number[node] = values[leaf++];
    else { number[node] = thresholds[inner++]; waiting.push(node); }
  }
  return {feature, number, right, roots};
}

// Returns the mean and the variance of the trees' values at x.
function walk({feature, number, right, roots}, x) {
  let sum = 0, squares = 0;
  for (let tree = 0; tree < roots.length; tree++) {
    let node = roots[tree], of;
    while ((of = feature[node]) !== 255) node = x[of] > number[node] ? right[node] : node + 1;
    sum += number[node];
    squares += number[node] ** 2;
  }
  const mean = sum / roots.length;
  return [mean, Math.max(0, squares / roots.length - mean ** 2)];
}

class AttentionModel {
  static async load(data, view) {
    const model = await loadModel(AttentionModel, data, view);
    if (data.learner) model.process = new GaussianProcess(data.learner, view);
    return model;
  }

  // Returns {us, low, high, seen} of causal attention of `seq` tokens.
  predict(batch, heads, kvHeads, seq, headDim, causal = true, backward = false) {
    return remember(this.known, [batch, heads, kvHeads, seq, headDim, causal, backward].join(),
      () => this.fresh(batch, heads, kvHeads, seq, headDim, causal, backward));
  }

  fresh(batch, heads, kvHeads, seq, headDim, causal, backward) {
    const b = this.cut(batch, heads, kvHeads, seq, headDim, causal), out = this.out;
    this.run(batch, heads, kvHeads, seq, seq, headDim, +causal, +backward,
      b.rows, b.keys, b.longest, b.blockM, b.blockN, b.width, b.group);
    const seen = this.masks.includes(causal ? 'causal' : 'full') && !backward && headDim % 8 === 0 &&
      headDim <= WIDEST_HEAD && this.learned;
    const [shift, deviation] = seen && this.process ? this.process.predict(out.subarray(1, 10)) : [0, 0];
    const half = this.factor * Math.sqrt(deviation ** 2 + this.floor ** 2) + (seen ? 0 : UNSEEN);
    const fastest = attentionFlops(batch, heads, seq, headDim, causal, backward) / this.flop_per_us;
    const us = Math.max(out[0] * Math.exp(shift), fastest);
    return {us, low: Math.max(us * Math.exp(-half - this.below), fastest), high: us * Math.exp(half + this.above), seen};
  }

  // Blocks of attention_cost_model.cut.
  cut(batch, heads, kvHeads, seq, headDim, causal) {
    const group = this.packs || seq === 1 ? Math.floor(heads / kvHeads) : 1;
    const [, full, masked] = this.tiles.find(tile => headDim <= tile[0]) || this.tiles[this.tiles.length - 1];
    const [blockM, blockN] = causal ? masked : full;
    const width = this.widths.find(w => w >= headDim) || Math.ceil(headDim / 64) * 64;
    const perHead = Math.ceil(seq * group / blockM), longest = Math.ceil(seq / blockN);
    let keys = perHead * longest;
    if (causal && perHead <= EXACT_BLOCKS) {
      keys = 0;
      for (let i = 0; i < perHead; i++) {
        const last = Math.min((i + 1) * blockM, seq * group) - 1;
        keys += Math.ceil((Math.floor(last / group) + 1) / blockN);
      }
    } else if (causal) {
      keys = perHead * (perHead + 1) / 2 * (blockM / group) / blockN + perHead * 0.5 * (1 - 1 / blockN);
    }
    const copies = batch * Math.floor(heads / group);
    return {rows: copies * perHead, keys: copies * keys, longest, blockM, blockN, width, group};
  }
}

function attentionFlops(batch, heads, seq, headDim, causal, backward) {
  const pairs = causal ? seq * (seq + 1) / 2 : seq * seq;
  return 4 * batch * heads * pairs * headDim * (backward ? 2.5 : 1);
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
      const row = i * rows;
      for (let j = 0; j <= i; j++) {
        let sum = this.kernel(this.scaled, i * width, j * width) + (i === j ? this.noise + 1e-10 * this.amplitude : 0);
        const other = j * rows;
        for (let d = 0; d < j; d++) sum -= L[row + d] * L[other + d];
        L[row + j] = i === j ? Math.sqrt(sum) : sum / L[other + j];
      }
    }
    const y = this.solve(L, Float64Array.from(this.targets));
    for (let i = rows - 1; i >= 0; i--) {
      y[i] /= L[i * rows + i];
      for (let j = 0; j < i; j++) y[j] -= L[i * rows + j] * y[i];
    }
    this.weights = y;
    // Single precision: the deviation changes by less than 1e-5 of itself.
    this.factor = new Float32Array(L);
    this.cross = new Float64Array(rows);
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
    const width = this.shift.length, cross = this.cross;
    const x = Array.from(features, (value, i) => (value - this.shift[i]) / this.spread[i] / this.length_scales[i]);
    let mean = this.centre;
    for (let i = 0; i < cross.length; i++) {
      cross[i] = this.kernel(x, 0, i * width);
      mean += cross[i] * this.weights[i];
    }
    let explained = 0;
    for (const value of this.solve(this.factor, cross)) explained += value * value;
    return [mean, Math.sqrt(Math.max(this.amplitude - explained, 0))];
  }
}

// Megatron's softmax of unfused attention; `separate` kernels move more bytes than the fused one.
class SoftmaxModel {
  predict({bytes, separate, rows, columns}) {
    this.run(bytes, rows, columns);
    const [us, low, high] = this.out, by = separate / bytes;
    return {us: by * us, low: by * low, high: by * high, fused: us};
  }
}

// The routed experts of a layer, on the GPU with the most rows.
class ExpertsModel {
  static async load(data, view) {
    const model = await loadModel(ExpertsModel, data, view);
    model.x = new Float32Array(data.columns);
    model.groups = data.groups.map(group => group.map(part => ({...part, forest: unpackForest(part.forest, view)})));
    return model;
  }

  // latency.moe_features.fewer_gpus
  fewerGpus({tokens, ep}) {
    for (let f = 1; f < ep; f++) if (ep % f === 0 && tokens <= f * this.most_tokens) return f;
    return ep;
  }

  predict(op, draws) {
    return remember(this.known, [op.tokens, op.hidden, op.ffn, op.gated, op.tp, op.experts, op.topK, op.ep, op.routing].join(), () => {
      const ffn = op.ffn / op.tp, out = this.out, loads = expertLoads(op, this.tiles, draws), fewer = this.fewerGpus(op);
      this.run(op.tokens / fewer, op.hidden, op.ffn, ffn, op.gated ? 2 * ffn : ffn, op.experts / fewer, op.topK, op.ep / fewer, ...loads);
      const [roofline, fastest] = out, mean = list => list.reduce((a, b) => a + b, 0) / list.length;
      const corrections = this.groups.map(group => mean(group.map(({at, base, forest}) => {
        this.x.set(out.subarray(at, at + this.columns));
        return base + walk(forest, this.x)[0];
      })));
      if (!corrections.length) corrections.push(0);
      const middle = mean(corrections), variance = mean(corrections.map(one => (one - middle) ** 2));
      const us = Math.max(Math.exp(roofline + middle), fastest), by = Math.exp(this.factor * Math.sqrt(variance + this.floor ** 2));
      return {us, low: Math.max(us / by, fastest), high: us * by};
    });
  }
}

// Rows, experts with rows, most and median rows of an expert, and tiles along the rows of each size, on the GPU with the
// most rows (latency.moe_features.ExpertLoads): means over draws of a power law.
function expertLoads({tokens, experts, topK, ep, routing}, tiles, draws) {
  const total = tokens * topK, exponent = exponentOf(routing), local = experts / ep, every = [];
  for (let draw = 0; draw < (exponent ? 4 : 1); draw++) {
    let rows;
    if (!exponent) rows = evenly(total, experts);
    else {
      const weights = powerLaw(draws.slice(draw * experts, (draw + 1) * experts), exponent, tokens, total);
      const scale = total / weights.reduce((a, b) => a + b, 0);
      rows = weights.map(weight => Math.min(roundEven(weight * scale), tokens));
    }
    const missing = total - rows.reduce((a, b) => a + b, 0);
    let busiest = null;
    for (let rank = 0; rank < ep; rank++) {
      const own = rows.slice(rank * local, (rank + 1) * local).sort((a, b) => a - b);
      const each = Math.floor(Math.abs(missing) / ep) + (rank < Math.abs(missing) % ep);
      const held = own.map((n, i) => Math.max(0, missing > 0 ? n + (i < each) : n - (local - 1 - i < each)));
      const sum = held.reduce((a, b) => a + b, 0);
      if (!busiest || sum > busiest.sum) busiest = {held, sum};
    }
    const sorted = busiest.held.sort((a, b) => a - b), half = (local - 1) / 2;
    every.push([busiest.sum, sorted.filter(n => n > 0).length, sorted[local - 1], (sorted[Math.floor(half)] + sorted[Math.ceil(half)]) / 2,
      ...tiles.map(tile => sorted.reduce((sum, n) => sum + Math.ceil(n / tile), 0))]);
  }
  return every[0].map((_, i) => every.reduce((sum, one) => sum + one[i], 0) / every.length);
}

const exponentOf = routing => routing === 'balanced' ? 0 : Number(routing.slice(10));
const evenly = (rows, experts) => Array.from({length: experts}, (_, e) => Math.floor((e + 1) * rows / experts) - Math.floor(e * rows / experts));

// Weights of experts: quantiles of a power law (workload.moe).
function powerLaw(shares, exponent, tokens, rows) {
  const [low, high] = rows > shares.length ? [1, 0.8 * tokens] : [0.01, 2], power = 1 - exponent;
  return shares.map(share => exponent === 1 ? low * (high / low) ** share
    : ((high ** power - low ** power) * share + low ** power) ** (1 / power));
}

// Tokens of each expert (workload.MoE.tokens_per_expert). draws: the first numbers of Python's random.Random(0).
function tokensPerExpert({tokens, experts, topK, ep, routing}, draws) {
  const rows = tokens * topK, exponent = exponentOf(routing);
  if (!exponent) return evenly(rows, experts);
  const weights = powerLaw(draws.slice(0, experts), exponent, tokens, rows), scale = rows / weights.reduce((a, b) => a + b, 0);
  const found = weights.map(weight => Math.min(roundEven(weight * scale), tokens)), local = experts / ep;
  let missing = rows - found.reduce((a, b) => a + b, 0);
  while (missing) {
    for (let rank = 0; rank < ep && missing; rank++) {
      let pick = rank * local;
      for (let e = pick; e < (rank + 1) * local; e++) if (missing > 0 ? found[e] < found[pick] : found[e] > found[pick]) pick = e;
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
