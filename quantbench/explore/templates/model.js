// What the generated code of the latency models calls (quantbench/explore/evaluator.py), and the draw of experts' rows.
// Makes the functions of a model from its text.
function functionsOf(data) {
  const text = new TextDecoder().decode(page.view(Uint8Array, data.code));
  const forests = (data.forests || []).map(walker), process = data.process && gaussianProcess(data.process);
  return new Function('forests', 'process', 'argmin', 'smallest', text)(forests, process, argmin, smallest);
}

const argmin = values => values.reduce((best, value, i) => value < values[best] ? i : best, 0);
const smallest = (values, n) => values.slice().sort()[n];

// Returns the function from features to the mean and the variance of the trees of a forest.
function walker(data) {
  const roots = page.view(Int32Array, data.roots), feature = page.view(Uint8Array, data.feature), LEAF = 255;
  const number = page.view(Float32Array, data.number), right = page.view(Int32Array, data.right);
  return columns => {
    const x = Float32Array.from(columns);
    let sum = 0, squares = 0;
    for (const root of roots) {
      let node = root, of;
      while ((of = feature[node]) !== LEAF) node = x[of] > number[node] ? node + right[node] : node + 1;
      sum += number[node];
      squares += number[node] ** 2;
    }
    const mean = sum / roots.length;
    return [mean, Math.max(0, squares / roots.length - mean ** 2)];
  };
}

// Returns the function from features to mean and deviation of a Gaussian process (Matérn 3/2), conditioned when first asked.
function gaussianProcess({amplitude, noise, centre, ...arrays}) {
  const names = ['features', 'targets', 'shift', 'spread', 'length_scales'];
  const [features, targets, shift, spread, scales] = names.map(name => page.view(Float64Array, arrays[name]));
  const rows = targets.length, width = shift.length, scaled = features.map((x, i) => x / scales[i % width]);
  const kernel = (left, at, row) => {
    let squared = 0;
    for (let d = 0; d < width; d++) squared += 3 * (left[at + d] - scaled[row * width + d]) ** 2;
    return amplitude * (1 + Math.sqrt(squared)) * Math.exp(-Math.sqrt(squared));
  };
  const solve = (L, y) => {
    for (let i = 0; i < rows; i++) {
      let sum = y[i];
      for (let j = 0, at = i * rows; j < i; j++, at++) sum -= L[at] * y[j];
      y[i] = sum / L[i * rows + i];
    }
    return y;
  };
  let factor = null, weights = null;
  const condition = () => {
    const L = new Float64Array(rows * rows);
    for (let i = 0; i < rows; i++) for (let j = 0; j <= i; j++) {
      let sum = kernel(scaled, i * width, j) + (i === j ? noise + 1e-10 * amplitude : 0);
      for (let d = 0; d < j; d++) sum -= L[i * rows + d] * L[j * rows + d];
      L[i * rows + j] = i === j ? Math.sqrt(sum) : sum / L[j * rows + j];
    }
    weights = solve(L, targets.slice());
    for (let i = rows - 1; i >= 0; i--) {
      weights[i] /= L[i * rows + i];
      for (let j = 0; j < i; j++) weights[j] -= L[i * rows + j] * weights[i];
    }
    factor = new Float32Array(L);  // the deviation changes by less than 1e-5 of itself
  };
  return raw => {
    if (!factor) condition();
    const x = raw.map((value, i) => (value - shift[i]) / spread[i] / scales[i]);
    const cross = targets.map((_, i) => kernel(x, 0, i));
    const mean = cross.reduce((sum, value, i) => sum + value * weights[i], centre);
    const explained = solve(factor, cross).reduce((sum, value) => sum + value * value, 0);
    return [mean, Math.sqrt(Math.max(amplitude - explained, 0))];
  };
}

const total = list => list.reduce((sum, one) => sum + one, 0);
const roundEven = x => Math.abs(x % 1) === 0.5 ? 2 * Math.round(x / 2) : Math.round(x);
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

// Rows, experts with rows, rows of the fullest and of the median expert, and tiles along the rows of each size, on the
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
  for (let rank = 0; missing; rank = (rank + 1) % ep) {
    let pick = rank * local;
    for (let e = pick; e < (rank + 1) * local; e++) if (missing > 0 ? found[e] < found[pick] : found[e] > found[pick]) pick = e;
    const step = missing > 0 ? Math.min(1, tokens - found[pick]) : -Math.min(1, found[pick]);
    found[pick] += step;
    missing -= step;
  }
  return found;
}
