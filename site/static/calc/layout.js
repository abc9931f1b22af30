// layout_memory.py, layout_traffic.py and combining.py of 05-advanced/advanced_parts, and
// 05-advanced/combining.py, for the browser: the same names, in the same order, and the methods of
// Layout, Job, Cluster and Prediction as functions. tests/test_site_calculators.py compares both.
const layout = (() => {
"use strict";

const { UsageError, peak_formula } =
  typeof module === "undefined" ? schedules : require("./schedules.js");
const sum = (values) => Object.values(values).reduce((total, value) => total + value, 0);
const GIB = 2 ** 30; // bytes

// layout_memory.py

const BF16 = 2, FP32 = 4; // bytes of a number
const OPTIMIZER = 12; // bytes per weight: float32 master copy and Adam's two moments
const LOGITS = 10; // bytes per logit: bfloat16, float32 probabilities, float32 gradient
const SHARDINGS = ["none", "grad-op", "full"];
const RECOMPUTE = ["none", "swiglu", "full"];

function Layout(tp = 1, cp = 1, dp = 1, pp = 1, sharding = "full", recompute = "none") {
  return { tp, cp, dp, pp, sharding, recompute };
}
const gpus_of = (layout) => layout.tp * layout.cp * layout.dp * layout.pp;
const replicas = (layout) => layout.dp * layout.cp;
const text_of = ({ tp, cp, dp, pp }) => `tp ${tp} x cp ${cp} x dp ${dp} x pp ${pp}`;

function micro_batches(job, layout) {
  return Math.floor(job.global_batch_size / (layout.dp * job.micro_batch_size));
}
function tokens_of(job, layout) {
  return Math.floor((job.micro_batch_size * job.seq_len) / layout.cp);
}

function seconds_of(cluster, sent, rate_gb_s, calls) {
  return sent / rate_gb_s / 1e9 + (calls * cluster.latency_us) / 1e6;
}

function num_parameters(config) { // dist_common/models.py, TransformerConfig
  const head_dim = Math.floor(config.dim / config.num_heads);
  const attention = 2 * config.dim * head_dim * (config.num_heads + config.num_kv_heads);
  const layer = attention + 3 * config.dim * config.ffn_dim + 2 * config.dim;
  const embeddings = config.vocab_size * config.dim * (config.tied_embeddings ? 1 : 2);
  return embeddings + config.num_layers * layer + config.dim;
}

function key_width(config) {
  return Math.floor(config.dim / config.num_heads) * config.num_kv_heads;
}

function products(config) {
  const D = config.dim, kv_dim = key_width(config), wide = config.dim * config.ffn_dim;
  return [D * D, D * kv_dim, D * kv_dim, D * D, wide, wide, wide];
}

const layer_matrices = (config) => sum(products(config));

const attention_flops = (config, seq_len) => 4 * seq_len * config.dim;

function activation_bytes(config, recompute = "none", number = BF16) {
  const wide = recompute === "swiglu" ? 2 : 4;
  const kept = 6 * config.dim + 2 * key_width(config) + wide * config.ffn_dim;
  return number * kept + FP32 * (config.num_heads + 2);
}

function layers_of_stages(num_layers, stages) {
  if (num_layers % stages === 0) return Array(stages).fill(num_layers / stages);
  const inner = Math.floor((num_layers + 2) / stages);
  return [inner - 1, ...Array(Math.max(0, stages - 2)).fill(inner), inner - 1];
}

function weights_of_stage(config, layout, stage) {
  const layers = layers_of_stages(config.num_layers, layout.pp)[stage];
  const last = stage === layout.pp - 1;
  const tables = (stage === 0) + (last && !(config.tied_embeddings && layout.pp === 1));
  const split = layers * layer_matrices(config) + tables * config.vocab_size * config.dim;
  return split / layout.tp + (2 * layers + last) * config.dim;
}

function forward_flops(job, layout) {
  const config = job.config, tokens = tokens_of(job, layout) / layout.tp;
  return {
    matrices: 2 * layer_matrices(config) * tokens,
    attention: attention_flops(config, job.seq_len) * tokens * job.causal_share,
    head: 2 * config.vocab_size * config.dim * tokens,
  };
}

function compute_seconds(job, cluster, layout) {
  const flops = forward_flops(job, layout);
  const layer = flops.matrices + flops.attention;
  const layers = layers_of_stages(job.config.num_layers, layout.pp);
  const slowest = Math.max(Math.max(...layers) * layer, layers.at(-1) * layer + flops.head);
  return slowest / (cluster.gpu_tflops * 1e12);
}

function in_flight(job, layout, stage) {
  const p = layout.pp, m = micro_batches(job, layout);
  return peak_formula(job.schedule, stage, p, m, job.virtual_stages);
}

function memory_of_stage(job, layout, stage) {
  const config = job.config, n = replicas(layout), full = layout.sharding === "full";
  const weights = weights_of_stage(config, layout, stage);
  const layer = layer_matrices(config) / layout.tp + 2 * config.dim;
  const sharded = layout.sharding !== "none";
  const reduces_at_once = full || (sharded && micro_batches(job, layout) === 1);
  const layers = layers_of_stages(config.num_layers, layout.pp)[stage];
  const tokens = tokens_of(job, layout) / layout.tp;
  const gathered = full ? weights - (layers - 2) * layer : weights;
  const held = layers * in_flight(job, layout, stage);
  const kept = activation_bytes(config, layout.recompute);
  let activations = held * kept;
  if (layout.recompute === "full") activations = held * BF16 * config.dim + kept;
  const head = LOGITS * config.vocab_size + 2 * BF16 * config.dim;
  return {
    weights: BF16 * gathered,
    gradients: FP32 * (reduces_at_once ? weights / n + layer : weights),
    optimizer: (OPTIMIZER * weights) / (sharded ? n : 1),
    activations: activations * tokens,
    logits: stage === layout.pp - 1 ? head * tokens : 0,
  };
}

function kept_by_the_template(config, layout) {
  if (layout.recompute === "full") return (BF16 * config.dim) / layout.tp;
  // As layer_bytes of dist_common/costs/memory.py adds up.
  let cut = 2 * config.dim + 4 * config.ffn_dim;
  cut += 2 * layout.cp * key_width(config) + config.dim * (layout.cp > 1);
  const norm = (BF16 * config.dim + FP32) / layout.tp + BF16 * config.dim;
  return (BF16 * cut + FP32 * config.num_heads) / layout.tp + 2 * norm;
}

function of_the_template(job, layout, stage) {
  const layers = layers_of_stages(job.config.num_layers, layout.pp)[stage];
  let kept = layers * in_flight(job, layout, stage) * kept_by_the_template(job.config, layout);
  if (layout.recompute === "full") {
    kept += kept_by_the_template(job.config, { ...layout, recompute: "none" });
  }
  const parts = memory_of_stage(job, layout, stage);
  return { ...parts, activations: kept * tokens_of(job, layout) };
}

// layout_traffic.py

const RESERVE = 0.1; // of a GPU's memory: CUDA context, NCCL's buffers, fragmentation

function Traffic(
  size, link, rate_gb_s, layer_bytes, step_bytes, seconds, behind_s, exposed_s,
) {
  return { size, link, rate_gb_s, layer_bytes, step_bytes, seconds, behind_s, exposed_s };
}

// Prediction's properties, which `replace` in Python computes anew.
function predicted(prediction) {
  const { memory, seconds, model_flops, memory_limit } = prediction;
  const step_s = sum(seconds);
  return {
    ...prediction,
    step_s,
    memory_gib: sum(memory) / GIB,
    fits: sum(memory) <= memory_limit,
    tflops: model_flops / step_s / 1e12,
  };
}

function place(rank, layout, order) {
  const where = {};
  for (const axis of order) {
    where[axis] = rank % layout[axis];
    rank = Math.floor(rank / layout[axis]);
  }
  return where;
}

function link_of(job, cluster, layout, axes, hops = false) {
  const others = job.order.filter((axis) => !axes.includes(axis));
  let inside = 0;
  for (let r = 0; r < Math.min(cluster.gpus_per_node, gpus_of(layout)); r++) {
    const where = place(r, layout, job.order);
    inside += !others.some((axis) => where[axis]);
  }
  const size = axes.reduce((product, axis) => product * layout[axis], 1);
  if (inside === size) return ["NVLink", cluster.nvlink_gb_s];
  const cards = hops ? 1 : inside;
  return [`network x${cards}`, Math.min(cluster.nvlink_gb_s, cards * cluster.network_gb_s)];
}

function tensor_traffic(job, cluster, layout, times) {
  const t = layout.tp;
  const [link, rate] = link_of(job, cluster, layout, ["tp"]);
  const one = ((t - 1) / t) * tokens_of(job, layout) * job.config.dim * BF16;
  const one_s = seconds_of(cluster, one, rate, t > 1);
  const awaited = 8 + 4 * (layout.recompute === "full");
  const behind = forward_flops(job, layout).matrices / cluster.gpu_tflops / 1e12;
  const exposed = awaited * one_s + Math.max(0, 2 * one_s - behind);
  const sent = (awaited + 2) * one;
  const seconds = (awaited + 2) * one_s * times;
  return Traffic(t, link, rate, sent, sent * times, seconds, behind * times, exposed * times);
}

function context_traffic(job, cluster, layout, times) {
  const c = layout.cp;
  const [link, rate] = link_of(job, cluster, layout, ["cp"], true);
  const passes = 3 + (layout.recompute === "full");
  const width = (passes - 1) * BF16 + FP32;
  const sent =
    (width * (c - 1) * tokens_of(job, layout) * 2 * key_width(job.config)) / layout.tp;
  const seconds = seconds_of(cluster, sent, rate, passes * (c - 1));
  const behind = (passes * forward_flops(job, layout).attention) / cluster.gpu_tflops / 1e12;
  const exposed = Math.max(0, seconds - behind) * times;
  return Traffic(c, link, rate, sent, sent * times, seconds * times, behind * times, exposed);
}

function pipeline_traffic(job, cluster, layout, compute_s) {
  const [link, rate] = link_of(job, cluster, layout, ["pp"], true);
  const split = layout.pp > 1;
  const sent = ((2 * tokens_of(job, layout) * job.config.dim * BF16) / layout.tp) * split;
  const times = micro_batches(job, layout) * (job.virtual_stages - (layout.pp === 2) / 2);
  const seconds = seconds_of(cluster, sent, rate, 2 * split) * times;
  const exposed = Math.max(0, seconds - compute_s);
  return Traffic(layout.pp, link, rate, sent, sent * times, seconds, compute_s, exposed);
}

function weight_traffic(job, cluster, layout, forward_s) {
  const n = replicas(layout), p = layout.pp, kind = layout.sharding;
  const [link, rate] = link_of(job, cluster, layout, ["cp", "dp"]);
  const stages = [0, Math.floor(p / 2), p - 1];
  const weights = Math.max(...stages.map((s) => weights_of_stage(job.config, layout, s)));
  const layer = layer_matrices(job.config) / layout.tp + 2 * job.config.dim;
  const reduced = job.reduce_bytes;
  const in_forward = { none: 0, "grad-op": BF16, full: BF16 }[kind];
  const in_backward = { none: 2 * reduced, "grad-op": reduced, full: BF16 + reduced }[kind];
  const share = (n - 1) / n;
  const times = kind === "full" ? micro_batches(job, layout) : 1;
  const gather_s = seconds_of(cluster, share * in_forward * weights, rate, 0);
  const reduce_s = seconds_of(cluster, share * in_backward * weights, rate, 0);
  const backward_s = (2 + (layout.recompute === "full")) * forward_s;
  const behind = (forward_s * (in_forward > 0) + backward_s) * times;
  const exposed =
    (Math.max(0, gather_s - forward_s) + Math.max(0, reduce_s - backward_s)) * times;
  const sent = share * (in_forward + in_backward) * times;
  const seconds = (gather_s + reduce_s) * times;
  return Traffic(n, link, rate, sent * layer, sent * weights, seconds, behind, exposed);
}

function powersgd_numbers(shapes, rank) {
  const numbers = shapes.map(([n, m]) => (m ? Math.min(rank, n, m) * (n + m) : n));
  return sum(numbers);
}

function bubble_of(job, layout) {
  return (layout.pp - 1) / (job.virtual_stages * micro_batches(job, layout));
}

function predict(job, cluster, layout) {
  if (replicas(layout) === 1) layout = { ...layout, sharding: "none" };
  const m = micro_batches(job, layout);
  const times = m * Math.max(...layers_of_stages(job.config.num_layers, layout.pp));
  const forward = compute_seconds(job, cluster, layout);
  const recomputes = layout.recompute === "full";
  const compute = (3 + recomputes) * forward * m;
  const traffic = {
    tp: tensor_traffic(job, cluster, layout, times),
    cp: context_traffic(job, cluster, layout, times),
    dp: weight_traffic(job, cluster, layout, forward),
    pp: pipeline_traffic(job, cluster, layout, compute),
  };
  const seconds = { compute };
  for (const axis of AXES) seconds[axis] = traffic[axis].exposed_s;
  const once = layout.sharding !== "full" ? seconds.dp : 0;
  seconds.bubble = bubble_of(job, layout) * (sum(seconds) - once);
  const stages = [...new Set([0, layout.pp - 1])];
  const stage = stages.reduce((most, s) =>
    sum(memory_of_stage(job, layout, s)) > sum(memory_of_stage(job, layout, most)) ? s : most);
  const flops = forward_flops(job, layout);
  const whole = job.config.num_layers * (flops.matrices + flops.attention);
  const memory_limit = (1 - RESERVE) * cluster.gpu_memory_gib * GIB;
  const model_flops = (3 * (whole + flops.head) * m) / layout.pp;
  const executed_flops = model_flops + (recomputes * whole * m) / layout.pp;
  return predicted({
    layout, traffic, memory: memory_of_stage(job, layout, stage), stage,
    in_flight: in_flight(job, layout, stage), seconds, model_flops, executed_flops, memory_limit,
  });
}

// advanced_parts/combining.py

function refusal(job, layout, gpus) {
  const { config } = job, { tp, cp, dp, pp } = layout;
  const chunks = pp * job.virtual_stages;
  const replica = dp * job.micro_batch_size;
  if (gpus_of(layout) !== gpus) {
    const is = `${text_of(layout)} is ${gpus_of(layout)} GPUs`;
    return `${is}, but --gpus is ${gpus}: make them equal`;
  }
  const cut = [[config.num_heads, "heads"], [config.num_kv_heads, "key-value heads"]];
  for (const [count, name] of cut) {
    if (count % tp) return `--tp ${tp} must divide the model's ${count} ${name}`;
  }
  if (config.num_layers % chunks && (pp < 2 || (config.num_layers + 2) % chunks)) {
    const virtual = ` x --virtual-stages ${job.virtual_stages}`;
    const stages = `--pp ${pp}` + (chunks !== pp ? virtual : "");
    const least = `${stages} must divide the model's ${config.num_layers} layers`;
    return `${least}, or ${config.num_layers + 2} where first and last stage have one less`;
  }
  if (Math.min(...layers_of_stages(config.num_layers, pp)) < 1) {
    return `--pp ${pp} leaves a stage without a layer: the model has ${config.num_layers}`;
  }
  if (job.seq_len % (cp > 1 ? 2 * cp : 1) || Math.floor(job.seq_len / cp) % tp) {
    const zigzag = cp > 1 ? ` (zig-zag: ${2 * cp} chunks)` : "";
    return `--seq-len ${job.seq_len} must be divisible by --cp ${cp}${zigzag} and --tp ${tp}`;
  }
  if (job.global_batch_size % replica) {
    const parts = `--dp ${dp} x --micro-batch-size ${job.micro_batch_size} = ${replica}`;
    return `--global-batch-size ${job.global_batch_size} must be divisible by ${parts}`;
  }
  if (job.schedule === "interleaved" && micro_batches(job, layout) < pp) {
    const few = `--schedule interleaved needs at least --pp ${pp} micro-batches`;
    return `${few}, this layout has ${micro_batches(job, layout)}: use 1f1b`;
  }
  return null;
}

function* layouts_of(job, gpus, shardings = SHARDINGS, recompute = RECOMPUTE) {
  const divisors = [];
  for (let n = 1; n <= gpus; n++) if (gpus % n === 0) divisors.push(n);
  for (const tp of divisors) for (const cp of divisors) for (const pp of divisors) {
    const dp = Math.floor(gpus / (tp * cp * pp));
    if (gpus % (tp * cp * pp) || refusal(job, Layout(tp, cp, dp, pp), gpus)) continue;
    for (const sharding of dp * cp > 1 ? shardings : ["none"]) {
      for (const again of recompute) yield Layout(tp, cp, dp, pp, sharding, again);
    }
  }
}

const FP8_SPEEDUP = 30587 / 24143;
const POWERSGD_RANK = 4;
const TOPK_SHARE = 0.01;
const TOPK_ENTRY = 8; // bytes: a float32 value and an int32 index
const LOCAL_STEPS = 50;

// The shapes that Transformer(config).parameters() has: (rows, columns), 0 columns for a vector.
function shapes_of(config) {
  const D = config.dim, F = config.ffn_dim, table = [config.vocab_size, D];
  const kv = [key_width(config), D];
  const layer = [[D, 0], [D, D], kv, kv, [D, D], [D, 0], [F, D], [F, D], [D, F]];
  const layers = Array(config.num_layers).fill(layer).flat();
  return [table, ...layers, [D, 0], ...(config.tied_embeddings ? [] : [table])];
}

const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)}%`;

function changes(job, cluster, layout) {
  const base = predict(job, cluster, layout);
  const dp = base.traffic.dp, m = micro_batches(job, layout);
  const rows = [["as above", base, ""]];

  function add_sender(name, sent, hidden, more, price) {
    const takes = sent / dp.rate_gb_s / 1e9;
    const own = { ...dp, step_bytes: sent, seconds: takes, exposed_s: Math.max(0, takes - hidden) };
    const seconds = { ...base.seconds, dp: own.exposed_s };
    const memory = { ...base.memory, copies: more }, traffic = { ...base.traffic, dp: own };
    rows.push([name, predicted({ ...base, traffic, seconds, memory }), price]);
  }

  for (const kind of RECOMPUTE) {
    if (kind !== layout.recompute) {
      const other = predict(job, cluster, { ...layout, recompute: kind });
      const share = other.executed_flops / base.executed_flops - 1;
      const price = `${share < 0 ? "" : "+"}${percent(share)} operations`;
      rows.push([`recompute ${kind}`, other, price]);
    }
  }
  for (const size of [Math.floor(job.micro_batch_size / 2), job.micro_batch_size * 2]) {
    if (size && job.global_batch_size % (size * layout.dp) === 0) {
      const other = { ...job, micro_batch_size: size };
      const name = `${micro_batches(other, layout)} micro-batches of ${size}`;
      rows.push([name, predict(other, cluster, layout), "none"]);
    }
  }
  const faster = { ...cluster, gpu_tflops: cluster.gpu_tflops * FP8_SPEEDUP };
  rows.push(["fp8 matmuls", predict(job, faster, layout), "rounding"]);
  if (replicas(layout) === 1) return rows;
  add_sender("without overlap", dp.step_bytes, 0, 0, "none");
  const halved = { ...job, reduce_bytes: BF16 };
  rows.push(["bf16 gradients", predict(halved, cluster, layout), "rounding"]);
  if (gpus_of(layout) > replicas(layout) || layout.sharding !== "none") return rows;
  const weights = weights_of_stage(job.config, layout, 0);
  const copy = FP32 * weights;
  const numbers = powersgd_numbers(shapes_of(job.config), POWERSGD_RANK);
  const low_rank = (dp.step_bytes * numbers) / weights;
  const chosen = (replicas(layout) - 1) * TOPK_SHARE * weights * TOPK_ENTRY;
  if (m > 1) add_sender("without no_sync", dp.step_bytes * m, dp.behind_s * m, 0, "none");
  add_sender(`PowerSGD, rank ${POWERSGD_RANK}`, low_rank, 0, copy, "loss, two passes");
  add_sender(`top ${percent(TOPK_SHARE)}`, chosen, 0, copy, "loss");
  add_sender(`DiLoCo, ${LOCAL_STEPS} steps`, dp.step_bytes / LOCAL_STEPS, 0, 2 * copy, "loss");
  return rows;
}

// combining.py; `args` are its flags, by argparse's names, and `config` in place of --model

const AXES = ["tp", "cp", "dp", "pp"];

function ranked(job, cluster, gpus, ...choices) {
  const found = [...layouts_of(job, gpus, ...choices)].map((l) => predict(job, cluster, l));
  if (!found.length) {
    const batch = `--global-batch-size ${job.global_batch_size} in sequences`;
    const hint = `change --gpus, ${batch}, or --virtual-stages`;
    const none = `no layout of ${gpus} GPUs divides heads, layers and batch`;
    throw new UsageError(`${none}: ${hint}`);
  }
  const size = (p) => (p.fits ? p.step_s : p.memory_gib);
  return found.sort((a, b) => b.fits - a.fits || size(a) - size(b));
}

// The names in describe_traffic's and describe_memory's templates, which presets.js has.
function words_of(job, prediction) {
  const { layout } = prediction, again = layout.recompute === "full";
  const full = layout.sharding === "full";
  const at_once = full || (layout.sharding === "grad-op" && micro_batches(job, layout) === 1);
  const kept = {
    none: "all that backward needs",
    swiglu: "all but SiLU and product",
    full: "each layer's input",
  };
  return {
    calls: again ? 14 : 10,
    width: again ? 10 : 8,
    per_weight: { none: 8, "grad-op": 6, full: 8 * micro_batches(job, layout) }[layout.sharding],
    n: replicas(layout),
    gathered: full ? "two layers and the tables" : "all of the stage",
    gradients: at_once ? "1/n, and one layer whole" : "all of the stage",
    shared: layout.sharding !== "none" ? " / n" : "",
    kept: kept[layout.recompute],
    flying: prediction.in_flight,
  };
}

function parse_order(text) {
  const order = text.split("-");
  if (order.length !== 4 || !AXES.every((axis) => order.includes(axis))) {
    throw new UsageError(`--order must name tp, cp, dp and pp once each, not '${text}'`);
  }
  return order;
}

function read_job(args) {
  const config = args.config, nodes = args.gpus_per_node;
  if (args.seq_len > config.max_seq_len) {
    throw new UsageError(`--seq-len must be at most ${config.max_seq_len} for ${args.model}`);
  }
  if (args.gpus > nodes && args.gpus % nodes) {
    const multiple = `must be a multiple of --gpus-per-node ${nodes}`;
    throw new UsageError(`--gpus ${args.gpus} ${multiple}`);
  }
  const interleaved = args.schedule === "interleaved";
  const virtual_stages = args.virtual_stages || (interleaved ? 2 : 1);
  if (interleaved !== virtual_stages > 1) {
    throw new UsageError("--virtual-stages above 1 and --schedule interleaved go together");
  }
  const { seq_len, global_batch_size, micro_batch_size, schedule, reduce_bytes = FP32 } = args;
  const { gpus_per_node, gpu_tflops, nvlink_gb_s, network_gb_s, latency_us } = args;
  return [
    {
      config, seq_len, global_batch_size, micro_batch_size, schedule, virtual_stages,
      order: parse_order(args.order), causal_share: 0.5, reduce_bytes,
    },
    {
      gpus_per_node, gpu_tflops, nvlink_gb_s, network_gb_s, latency_us,
      gpu_memory_gib: args.gpu_memory_gib,
    },
  ];
}

function predict_all(args, job, cluster) {
  if (AXES.some((axis) => args[axis])) {
    const sizes = AXES.map((axis) => args[axis] || 1);
    const layout = Layout(...sizes, args.fsdp || "full", args.recompute || "none");
    const why_not = refusal(job, layout, args.gpus);
    if (why_not) throw new UsageError(why_not);
    return [predict(job, cluster, layout)];
  }
  const shardings = args.fsdp ? [args.fsdp] : SHARDINGS;
  const recompute = args.recompute ? [args.recompute] : RECOMPUTE;
  return ranked(job, cluster, args.gpus, shardings, recompute);
}

// A model's config.json, by the names and defaults of dist_common/shapes.py. The formulas know
// Llama's shape: what has another one is refused; a bias or a norm of the queries is not counted.
function config_of(text, HF_SHAPE, DEFAULTS) {
  let theirs;
  try {
    theirs = JSON.parse(text);
  } catch (error) {
    throw new UsageError(`config.json: ${error.message}`);
  }
  if (theirs === null || typeof theirs !== "object") throw new UsageError("config.json: no object");
  const experts = theirs.num_local_experts ?? theirs.num_experts ?? theirs.n_routed_experts;
  if (experts > 1) {
    throw new UsageError(`config.json: ${experts} experts: these formulas know dense models only`);
  }
  const filled = { ...DEFAULTS, num_key_value_heads: theirs.num_attention_heads, ...theirs };
  const config = {};
  for (const [name, ours] of Object.entries(HF_SHAPE)) {
    const value = filled[name];
    const right = ours === "tied_embeddings" ? typeof value === "boolean" : value > 0;
    const whole = !["norm_eps", "rope_theta"].includes(ours);
    if (!right || (typeof value === "number" && whole && value % 1)) {
      throw new UsageError(`config.json: ${name} is ${JSON.stringify(value) ?? "missing"}`);
    }
    config[ours] = value;
  }
  const head_dim = config.dim / config.num_heads;
  if (head_dim % 1 || (theirs.head_dim ?? head_dim) !== head_dim) {
    const has = `heads are ${theirs.head_dim ?? head_dim} wide`;
    const need = `these formulas need hidden_size / num_attention_heads = ${head_dim}`;
    throw new UsageError(`config.json: ${has}, and ${need}`);
  }
  return config;
}

return {
  UsageError, GIB, RESERVE, AXES, SHARDINGS, RECOMPUTE, Layout, gpus_of, replicas, text_of,
  micro_batches, num_parameters, of_the_template, link_of, predict, refusal, layouts_of, changes,
  ranked, shapes_of, words_of, parse_order, read_job, predict_all, config_of, percent,
};
})();
if (typeof module !== "undefined") module.exports = layout;
