// Products of few rows with weights as torch keeps them, and all else of a Llama's decoder layer.
//
// A thread reads its share of the weights from front to back, sixteen outputs at a time, so that
// memory is the only limit. Sums are in float32.
#include "cpu_choices.h"
#include "cpu_products.h"

#include <omp.h>

typedef struct { const number *weight, *bias; number *out; long outputs; } Layer;

enum { AHEAD = 16, TOGETHER = 64 };  // slots whose keys are fetched ahead; rows that read the same

static floats silu(floats values) { return values / (all(1) + exp_of(-values)); }

// What layers make of the same states [rows, in]; or, gated, SiLU(first) * second; or plus added,
// which is as large as the output. By all threads of a team; space is for the states' layout.
static void product(const Layer *layers, int count, int gated, const number *added,
                    const number *states, void *space, long rows, long in) {
  float sums[64 * LINES] __attribute__((aligned(64))), gates[64 * LINES];
  float *own = gated ? gates : sums;
  long blocks = 0;
  for (int each = 0; each < (gated ? 1 : count); each++) blocks += layers[each].outputs / LINES;
  const void *ready = lay_out_rows(states, space, rows, in);
#pragma omp for schedule(static)
  for (long block = 0; block < blocks; block++) {
    const Layer *layer = layers;
    long first = block * LINES;
    while (first >= layer->outputs) first -= layer++->outputs;
    sixteen_outputs(layer->weight + first * in, ready, rows, in, own);
    if (gated) sixteen_outputs(layer[1].weight + first * in, ready, rows, in, sums);
    for (long row = 0; row < rows; row++)
      for (long at = 0; at < LINES; at += LANES) {
        long place = row * layer->outputs + first + at;
        floats found = load(own + row * LINES + at);
        if (layer->bias) found += wide(layer->bias + first + at);
        if (gated) {
          floats other = load(sums + row * LINES + at);
          if (layer[1].bias) other += wide(layer[1].bias + first + at);
          found = as_kept(silu(as_kept(found))) * as_kept(other);
        }
        if (added) found = as_kept(found) + wide(added + place);
        keep(layer->out + place, found);
      }
  }
}

static void *space_for(long rows, long in) {
  long bytes = layout_bytes(rows, in);
  return bytes ? aligned_alloc(64, (bytes + 63) / 64 * 64) : NULL;
}

typedef struct {
  const number *states;
  long rows, in, threads, gated, count;
  Layer layers[3];
} Products;

// See product. in is a multiple of 32, outputs are multiples of 16, there are at most 64 rows.
void products(const Products *given) {
  long rows = given->rows, in = given->in;
  void *space = space_for(rows, in);
#pragma omp parallel num_threads(given->threads)
  {
    begin_products(rows);
    product(given->layers, given->count, given->gated, NULL, given->states, space, rows, in);
    end_products(rows);
  }
  free(space);
}

// What layers [count, outputs, in] make of states of their own [count, rows, in]: [count, rows,
// outputs]. Sizes are as of products.
void each_product(const number *states, const number *weights, number *out, long count, long rows,
                  long in, long outputs, int threads) {
  void *space = space_for(rows, in);
#pragma omp parallel num_threads(threads)
  {
    begin_products(rows);
    for (long each = 0; each < count; each++) {
      Layer own = {weights + each * outputs * in, NULL, out + each * rows * outputs, outputs};
      product(&own, 1, 0, NULL, states + each * rows * in, space, rows, in);
    }
    end_products(rows);
  }
  free(space);
}

// Where there is no weight the row stays as it is.
static void norm_row(const number *states, const number *weight, number *out, long in, float eps) {
  if (!weight) {
    memcpy(out, states, in * sizeof(number));
    return;
  }
  floats squares = all(0);
  for (long at = 0; at < in; at += LANES) squares += wide(states + at) * wide(states + at);
  floats scale = all(1 / sqrtf(sum_of(squares) / in + eps));
  for (long at = 0; at < in; at += LANES)
    keep(out + at, as_kept(wide(states + at) * scale) * wide(weight + at));
}

// Llama's norm of rows [rows, in]: over the root mean square, kept, times a weight.
void norm(const number *states, const number *weight, number *out, long rows, long in, float eps) {
  for (long row = 0; row < rows; row++)
    norm_row(states + row * in, weight, out + row * in, in, eps);
}

// The rotary embedding of a head [size]; out may be the same. Half of it is a multiple of 16.
static void rotate_head(const number *states, const number *cos, const number *sin, number *out,
                        long size) {
  long half = size / 2;
  for (long at = 0; at < half; at += LANES) {
    floats low = wide(states + at), high = wide(states + half + at);
    keep(out + at, low * wide(cos + at) - high * wide(sin + at));
    keep(out + half + at, high * wide(cos + half + at) + low * wide(sin + half + at));
  }
}

// The rotary embedding of rows [rows, heads, size] by cos and sin [rows, size].
void rotate(const number *states, const number *cos, const number *sin, number *out, long rows, long heads,
            long size) {
  for (long head = 0; head < rows * heads; head++) {
    long angle = head / heads * size;
    rotate_head(states + head * size, cos + angle, sin + angle, out + head * size, size);
  }
}

// A row's scores of slots, padded to whole vectors, become their exponentials; returns the sum.
static float soften(float *scores, long slots, float scale, const number *mask) {
  long padded = (slots + LANES - 1) / LANES * LANES;
  floats largest = all(-INFINITY), sum = all(0);
  for (long slot = slots; slot < padded; slot++) scores[slot] = -INFINITY;
  for (long slot = 0; slot < padded; slot += LANES) {
    floats now = load(scores + slot) * scale;
    if (mask) {
      number last[LANES] = {0};
      if (slots - slot < LANES) memcpy(last, mask + slot, (slots - slot) * sizeof(number));
      now += wide(slots - slot < LANES ? last : mask + slot);
    }
    store(scores + slot, now);
    largest = OF_VECTOR(max_ps)(largest, now);
  }
  floats most = all(largest_of(largest));
  for (long slot = 0; slot < padded; slot += LANES) {
    floats now = exp_of(load(scores + slot) - most);
    store(scores + slot, now);
    sum += now;
  }
  return sum_of(sum);
}

// What few rows attend to: the sum of values [slots, size] by their shares [rows, apart], over the
// total of these.
INLINED void sum_values(const int rows, const float *shares, long apart, const float *total,
                        const number *values, long step, long slots, long size, number *const *out) {
  for (long at = 0; at < size; at += 2 * LANES) {
    floats sum[6][2];
    for (int row = 0; row < rows; row++) sum[row][0] = sum[row][1] = all(0);
    for (long slot = 0; slot < slots; slot++) {
      floats pair[2];
      wide_pair(values + slot * step + at, pair);
#pragma GCC unroll 6
      for (int row = 0; row < rows; row++) {
        floats share = all(shares[row * apart + slot]);
        sum[row][0] += share * pair[0], sum[row][1] += share * pair[1];
      }
    }
    for (int row = 0; row < rows; row++) {
      sum[row][0] /= total[row], sum[row][1] /= total[row];
      keep_pair(out[row] + at, sum[row]);
    }
  }
}

// See sum_values; of any number of rows, in groups that are alike.
static void sums_of_values(long rows, const float *shares, long apart, const float *total,
                           const number *values, long step, long slots, long size,
                           number *const *out) {
  int groups = (rows + 5) / 6;
  for (int group = 0; group < groups; group++) {
    long from = rows * group / groups, to = rows * (group + 1) / groups;
    const float *own = shares + from * apart;
#define OF_ROWS(count)                                                                          \
  case count:                                                                                   \
    sum_values(count, own, apart, total + from, values, step, slots, size, out + from); break
    switch (to - from) {
      OF_ROWS(1); OF_ROWS(2); OF_ROWS(3); OF_ROWS(4); OF_ROWS(5); OF_ROWS(6);
    }
#undef OF_ROWS
  }
}

static void fetch(const number *from, long count) {
  for (long at = 0; at < count; at += STEP) FETCH(from + at);
}

// What attention reads and writes: query and out are [batch, nodes, heads * group, size], keys,
// values and masks have steps of their own. Sizes are multiples of 32.
typedef struct {
  const number *query, *key, *value, *mask;
  number *out;
  long batch, nodes, heads, group, slots, size, value_size;
  long key_steps[3], value_steps[3], mask_steps[2];  // text, head, slot; text, node
  float scale;
} Attention;

// So far are a row's scores from the next row's: four are written at once, from any slot on.
static long apart_of(const Attention *now) { return (now->slots + 3 + 15) / 16 * 16; }

static float *room_for(const Attention *now) {
  return aligned_alloc(64, TOGETHER * (apart_of(now) + now->size) * sizeof(float));
}

// Attention of some rows of a head, from `first` on, at most TOGETHER. They have their scores in room.
static void attend_rows(const Attention *now, long text, long head, long first, long rows,
                        float *room) {
  long apart = apart_of(now), size = now->size, wide = now->value_size, slots = now->slots;
  const long *k = now->key_steps, *v = now->value_steps, *m = now->mask_steps;
  const number *keys = now->key + text * k[0] + head * k[1];
  const number *values = now->value + text * v[0] + head * v[1];
  state *states = (state *)(room + TOGETHER * apart);
  float total[TOGETHER];
  number *out[TOGETHER];
  for (long row = 0; row < rows; row++) {
    long node = (first + row) / now->group, each = (first + row) % now->group;
    long place = ((text * now->nodes + node) * now->heads + head) * now->group + each;
    lay_out(now->query + place * size, states + row * size, size);
    out[row] = now->out + place * wide;
  }
  for (long slot = 0, step = k[2]; slot < slots; slot += step ? 4 : 1) {
    if (slots - slot < 4) step = 0;  // the last slots one by one, as four that are the same
    for (long each = slot; each < slot + 4; each++) {  // read in steps that no core foresees
      fetch(keys + (each + AHEAD) * k[2], size);
      fetch(values + each * v[2], wide);
    }
    dots(keys + slot * k[2], step, states, rows, size, room + slot, apart);
  }
  for (long row = 0; row < rows; row++) {
    const number *mask = now->mask;
    if (mask) mask += text * m[0] + (first + row) / now->group * m[1];
    total[row] = soften(room + row * apart, slots, now->scale, mask);
  }
  sums_of_values(rows, room, apart, total, values, v[2], slots, wide, out);
}

// By all threads of a team, each with room of its own. Rows of a head are divided only where they
// are very many, or threads would have unlike shares.
static void attend_in_team(const Attention *now, float *room) {
  long rows = now->nodes * now->group, heads = now->batch * now->heads;
  long parts = (rows + TOGETHER - 1) / TOGETHER;
  while (heads * parts % omp_get_num_threads() && parts < (rows + 3) / 4) parts++;
#pragma omp for schedule(static)
  for (long task = 0; task < heads * parts; task++) {
    long part = task % parts, head = task / parts;
    long first = rows * part / parts, count = rows * (part + 1) / parts - first;
    attend_rows(now, head / now->heads, head % now->heads, first, count, room);
  }
}

void attend(const Attention *attention, int threads) {
#pragma omp parallel num_threads(threads)
  {
    float *room = room_for(attention);
    attend_in_team(attention, room);
    free(room);
  }
}

// What is a decoder layer's own: weights of the norms, of queries, keys, values and output, of gate,
// up and down; biases of the last seven, or NULL; weights of the norms of each head's query and key,
// as Qwen3's layers have, or NULL. EAGLE-3's layer reads two rows beside one another, of which queries,
// keys and values are made: the first norm is of the one, and second_norm, NULL elsewhere, of the
// other, to which the layer adds, once normed if adds_to_normed. Keys and values are of its cache, and
// eps what norms add, in this order.
typedef struct {
  const number *weights[9], *biases[7], *head_norms[2], *second_norm;
  number *key, *value;
  long adds_to_normed;
  float eps[5];
} Decoder;

// Decoder layers of a Llama or Qwen on states [rows, in], or [rows, 2 * in] where the first has a
// second norm, one after the other, in one piece: norms, attention with what it writes to the cache,
// and the gated product. Of attention, query, key, value and out are not given. New keys and values go
// to slots [batch, nodes], counted through all texts, or where slots is NULL to those from first on. A
// last norm comes after them, but where it is NULL.
void decoder_layers(const Decoder *layers, long count, const number *states, number *out, long in,
                    long inner, const number *cos, const number *sin, const Attention *given,
                    const int64_t *slots, long first_slot, const number *last, float last_eps,
                    int threads) {
  Attention now = *given;
  long rows = now.batch * now.nodes, size = now.size, heads = now.heads * now.group;
  long asked = heads * size, kept = now.heads * size, widest = inner > asked ? inner : asked;
  long numbers = rows * (4 * in + 2 * asked + 2 * kept + inner);
  number *between = aligned_alloc(64, (numbers * sizeof(number) + 63) / 64 * 64);
  number *normed = between, *residual = normed + rows * 2 * in, *middle = residual + rows * in;
  number *query = middle + rows * in;
  number *found = query + rows * asked, *key = found + rows * asked, *value = key + rows * kept;
  number *gated = value + rows * kept;
  long read = layers->second_norm ? 2 * in : in;
  void *space = space_for(rows, widest > read ? widest : read);
  now.query = query, now.out = found;
#pragma omp parallel num_threads(threads) firstprivate(now, states)
  {
    float *room = room_for(&now);
    begin_products(rows);
    for (const Decoder *own = layers; own < layers + count; own++, states = out) {
      const number *const *w = own->weights, *const *b = own->biases;
      const number *const *h = own->head_norms;
      Layer first[3] = {{w[2], b[0], query, asked}, {w[3], b[1], key, kept},
                        {w[4], b[2], value, kept}};
      Layer output = {w[5], b[3], middle, in}, down = {w[8], b[6], out, in};
      Layer both[2] = {{w[6], b[4], gated, inner}, {w[7], b[5], gated, inner}};
      now.key = own->key, now.value = own->value;
      const number *second = own->second_norm, *added = second ? residual : states;
      long width = second ? 2 * in : in;
#pragma omp for
      for (long row = 0; row < rows; row++) {
        const number *from = states + row * width;
        number *to = normed + row * width;
        norm_row(from, w[0], to, in, own->eps[0]);
        if (!second) continue;
        norm_row(from + in, second, to + in, in, own->eps[4]);
        memcpy(residual + row * in, own->adds_to_normed ? to + in : from + in, in * sizeof(number));
      }
      product(first, 3, 0, NULL, normed, space, rows, width);
#pragma omp for
      for (long task = 0; task < rows * (heads + now.heads); task++) {
        long row = task / (heads + now.heads), head = task % (heads + now.heads) - now.heads;
        const number *c = cos + row * size, *s = sin + row * size;
        if (head >= 0) {
          number *mine = query + row * asked + head * size;
          if (h[0]) norm_row(mine, h[0], mine, size, own->eps[2]);
          rotate_head(mine, c, s, mine, size);
          continue;
        }
        head += now.heads;
        long text = row / now.nodes, slot = first_slot + row % now.nodes;
        long from = row * kept + head * size;
        if (slots) text = 0, slot = slots[row];
        const long *k = now.key_steps, *v = now.value_steps;
        if (h[1]) norm_row(key + from, h[1], key + from, size, own->eps[3]);
        rotate_head(key + from, c, s, own->key + text * k[0] + head * k[1] + slot * k[2], size);
        memcpy(own->value + text * v[0] + head * v[1] + slot * v[2], value + from,
               size * sizeof(number));
      }
      attend_in_team(&now, room);
      product(&output, 1, 0, added, found, space, rows, asked);
#pragma omp for
      for (long row = 0; row < rows; row++)
        norm_row(middle + row * in, w[1], normed + row * in, in, own->eps[1]);
      product(both, 2, 1, NULL, normed, space, rows, in);
      product(&down, 1, 0, middle, gated, space, rows, inner);
    }
    if (last)
#pragma omp for
      for (long row = 0; row < rows; row++)
        norm_row(out + row * in, last, out + row * in, in, last_eps);
    end_products(rows);
    free(room);
  }
  free(space);
  free(between);
}

// Move what a cache's rows hold for nodes path [batch, steps] to their text's first slots, in order.
// Of rows [entries, batch * apart, bytes], slots [batch, nodes] count through all texts; where slots
// is NULL, those of each text are from first on. All that a text moves is read before it is written.
void move_path(char *rows, long entries, long apart, long bytes, const int64_t *slots, long first,
               long nodes, const int64_t *path, long batch, long steps) {
  char *read = malloc(steps * bytes);
  for (long each = 0; each < entries * batch; each++) {
    long text = each % batch;
    const int64_t *own = slots + text * nodes, *from = path + text * steps;
    char *all = rows + each / batch * batch * apart * bytes;
#define SLOT(node) (all + (slots ? own[node] : text * apart + first + (node)) * bytes)
    for (long step = 0; step < steps; step++)
      memcpy(read + step * bytes, SLOT(from[step]), bytes);
    for (long step = 0; step < steps; step++) memcpy(SLOT(step), read + step * bytes, bytes);
#undef SLOT
  }
  free(read);
}
