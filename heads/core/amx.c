// Products of few rows with weights in bfloat16 as torch keeps them, [outputs, in], in one pass.
//
// A thread reads its share of the weights from front to back, sixteen outputs at a time, so that
// memory is the only limit. Those sixteen lines are one operand of AMX, the states, their pairs
// transposed, are the other, so nothing of a weight is laid out anew. Sums are in float32.
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef uint16_t bf16;
typedef struct { const bf16 *weight, *bias; bf16 *out; long outputs; } Layer;

enum { LINES = 16, STEP = 32, AHEAD = 16 };  // lines of a tile, numbers of a line; slots

// Ask for the use of tiles, which Linux grants a process once; 0 where it does.
int ask_for_tiles(void) { return syscall(SYS_arch_prctl, 0x1023, 18) != 0; }

__m512 _ZGVeN16v_expf(__m512);  // exp of sixteen numbers, in glibc's libmvec

static __m256i narrow(__m512 values) { return (__m256i)_mm512_cvtneps_pbh(values); }

static __m512 wide(const bf16 *values) {
  __m256i bits = _mm256_loadu_si256((const __m256i *)values);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

static __m512 as_kept(__m512 values) {  // rounded as if it had been stored
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow(values)), 16));
}

static void set_tiles(void) {
  struct { uint8_t palette, start, rest[14]; uint16_t bytes[16]; uint8_t lines[16]; }
      tiles __attribute__((aligned(64))) = {.palette = 1};
  for (int tile = 0; tile < 6; tile++) tiles.bytes[tile] = 64, tiles.lines[tile] = LINES;
  _tile_loadconfig(&tiles);
}

// Sixteen outputs of one row.
static void one_row(const bf16 *weight, const bf16 *row, long in, float *sums) {
  for (int first = 0; first < LINES; first += 4) {
    const bf16 *line = weight + first * in;
    __m512 sum[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(),
                     _mm512_setzero_ps()};
    for (long at = 0; at < in; at += STEP) {
      __m512bh states = (__m512bh)_mm512_loadu_si512(row + at);
#pragma GCC unroll 4
      for (int each = 0; each < 4; each++) {
        _mm_prefetch((const char *)(line + (4 + each) * in + at), _MM_HINT_T0);
        sum[each] = _mm512_dpbf16_ps(sum[each], states,
                                     (__m512bh)_mm512_loadu_si512(line + each * in + at));
      }
    }
    for (int each = 0; each < 4; each++) sums[first + each] = _mm512_reduce_add_ps(sum[each]);
  }
}

// Sixteen outputs of up to 64 rows, whose pairs are transposed; sums [rows, 16].
static void many_rows(const bf16 *weight, const uint32_t *pairs, long rows, long in, float *sums) {
  float found[4][LINES * 16] __attribute__((aligned(64)));
  int groups = (rows + 15) / 16;
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  for (long at = 0; at < in; at += STEP) {
    for (int line = 0; line < LINES; line++)
      _mm_prefetch((const char *)(weight + (LINES + line) * in + at), _MM_HINT_T0);
    const uint32_t *states = pairs + at / 2 * 16;
    _tile_loadd(4, weight + at, in * sizeof(bf16));
    _tile_loadd(5, states, 64); _tile_dpbf16ps(0, 4, 5);
    if (groups > 1) { _tile_loadd(5, states + 8 * in, 64); _tile_dpbf16ps(1, 4, 5); }
    if (groups > 2) { _tile_loadd(5, states + 16 * in, 64); _tile_dpbf16ps(2, 4, 5); }
    if (groups > 3) { _tile_loadd(5, states + 24 * in, 64); _tile_dpbf16ps(3, 4, 5); }
  }
  _tile_stored(0, found[0], 64);
  if (groups > 1) _tile_stored(1, found[1], 64);
  if (groups > 2) _tile_stored(2, found[2], 64);
  if (groups > 3) _tile_stored(3, found[3], 64);
  __m512i column = _mm512_slli_epi32(
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 4);
  for (long row = 0; row < rows; row++)
    _mm512_storeu_ps(sums + row * LINES,
                     _mm512_i32gather_ps(column, found[row / 16] + row % 16, 4));
}

// Pairs of numbers of states [rows, in] as tiles read them; by all threads of a team.
static void transpose_pairs(const bf16 *states, uint32_t *pairs, long rows, long in) {
  const uint32_t *from = (const uint32_t *)states;
  long half = in / 2, padded = (rows + 15) / 16 * 16;
#pragma omp for
  for (long first = 0; first < half; first += 16)
    for (long row = 0; row < padded; row++) {
      uint32_t *to = pairs + row / 16 * (half * 16) + row % 16;
      for (long pair = first; pair < first + 16; pair++)
        to[pair * 16] = row < rows ? from[row * half + pair] : 0;
    }
}

// Sixteen outputs of a layer for all rows, and what it adds to them.
static __m512 block_of(const Layer *layer, long block, const bf16 *states, const uint32_t *pairs,
                       long rows, long in, float *sums) {
  const bf16 *weight = layer->weight + block * LINES * in;
  if (rows == 1) one_row(weight, states, in, sums);
  else many_rows(weight, pairs, rows, in, sums);
  return layer->bias ? wide(layer->bias + block * LINES) : _mm512_setzero_ps();
}

static __m512 silu(__m512 values) {
  __m512 one = _mm512_set1_ps(1), below = _mm512_sub_ps(_mm512_setzero_ps(), values);
  return _mm512_div_ps(values, _mm512_add_ps(one, _ZGVeN16v_expf(below)));
}

// What layers make of the same states [rows, in]; or, gated, SiLU(first) * second; or plus added,
// which is as large as the output. By all threads of a team; pairs is scratch.
static void product(const Layer *layers, int count, int gated, const bf16 *added,
                    const bf16 *states, uint32_t *pairs, long rows, long in) {
  float sums[64 * LINES] __attribute__((aligned(64))), gates[64 * LINES];
  float *own = gated ? gates : sums;
  long blocks = 0;
  for (int each = 0; each < (gated ? 1 : count); each++) blocks += layers[each].outputs / LINES;
  if (rows > 1) transpose_pairs(states, pairs, rows, in);
#pragma omp for schedule(static)
  for (long number = 0; number < blocks; number++) {
    const Layer *layer = layers;
    long block = number;
    while (block >= layer->outputs / LINES) block -= layer++->outputs / LINES;
    __m512 bias = block_of(layer, block, states, pairs, rows, in, own), other = bias;
    if (gated) other = block_of(layer + 1, block, states, pairs, rows, in, sums);
    for (long row = 0; row < rows; row++) {
      long place = row * layer->outputs + block * LINES;
      __m512 found = _mm512_add_ps(_mm512_loadu_ps(own + row * LINES), bias);
      if (gated)
        found = _mm512_mul_ps(
            as_kept(silu(as_kept(found))),
            as_kept(_mm512_add_ps(_mm512_loadu_ps(sums + row * LINES), other)));
      if (added) found = _mm512_add_ps(as_kept(found), wide(added + place));
      _mm256_storeu_si256((__m256i *)(layer->out + place), narrow(found));
    }
  }
}

static uint32_t *scratch_of_pairs(long rows, long in) {
  return rows > 1 ? aligned_alloc(64, (rows + 15) / 16 * 16 * in * sizeof(bf16)) : NULL;
}

// See product. in is a multiple of 32, outputs are multiples of 16, there are at most 64 rows.
void products(const bf16 *states, long rows, long in, int threads, int gated, int count,
              const bf16 *w0, const bf16 *b0, bf16 *y0, long n0,
              const bf16 *w1, const bf16 *b1, bf16 *y1, long n1,
              const bf16 *w2, const bf16 *b2, bf16 *y2, long n2) {
  Layer layers[3] = {{w0, b0, y0, n0}, {w1, b1, y1, n1}, {w2, b2, y2, n2}};
  uint32_t *pairs = scratch_of_pairs(rows, in);
#pragma omp parallel num_threads(threads)
  {
    if (rows > 1) set_tiles();
    product(layers, count, gated, NULL, states, pairs, rows, in);
    if (rows > 1) _tile_release();
  }
  free(pairs);
}

static void norm_row(const bf16 *states, const bf16 *weight, bf16 *out, long in, float eps) {
  __m512 squares = _mm512_setzero_ps();
  for (long at = 0; at < in; at += 16)
    squares = _mm512_fmadd_ps(wide(states + at), wide(states + at), squares);
  __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(squares) / in + eps);
  __m512 scale = _mm512_div_ps(_mm512_set1_ps(1), _mm512_sqrt_ps(mean));
  for (long at = 0; at < in; at += 16) {
    __m512 kept = as_kept(_mm512_mul_ps(wide(states + at), scale));
    _mm256_storeu_si256((__m256i *)(out + at), narrow(_mm512_mul_ps(kept, wide(weight + at))));
  }
}

// Llama's norm of rows [rows, in]: over the root mean square, kept, times a weight.
void norm(const bf16 *states, const bf16 *weight, bf16 *out, long rows, long in, float eps) {
  for (long row = 0; row < rows; row++)
    norm_row(states + row * in, weight, out + row * in, in, eps);
}

// The rotary embedding of a head [size]; out may be the same. Half of it is a multiple of 16.
static void rotate_head(const bf16 *states, const bf16 *cos, const bf16 *sin, bf16 *out,
                        long size) {
  long half = size / 2;
  for (long at = 0; at < half; at += 16) {
    __m512 low = wide(states + at), high = wide(states + half + at);
    __m512 first = _mm512_fnmadd_ps(high, wide(sin + at), _mm512_mul_ps(low, wide(cos + at)));
    __m512 last = _mm512_fmadd_ps(low, wide(sin + half + at),
                                  _mm512_mul_ps(high, wide(cos + half + at)));
    _mm256_storeu_si256((__m256i *)(out + at), narrow(first));
    _mm256_storeu_si256((__m256i *)(out + half + at), narrow(last));
  }
}

// The rotary embedding of rows [rows, heads, size] by cos and sin [rows, size].
void rotate(const bf16 *states, const bf16 *cos, const bf16 *sin, bf16 *out, long rows, long heads,
            long size) {
  for (long head = 0; head < rows * heads; head++) {
    long angle = head / heads * size;
    rotate_head(states + head * size, cos + angle, sin + angle, out + head * size, size);
  }
}

// Attention of a few rows that read the same keys [slots, size] and values; scores is scratch.
static inline __attribute__((always_inline)) void attend_rows(
    const int rows, const bf16 *const *query, const bf16 *key, const bf16 *value, long key_step,
    long value_step, long slots, long size, long value_size, float scale, const bf16 *const *mask,
    bf16 *const *out, float *scores) {
  long padded = (slots + 15) / 16 * 16;
  float most[4], total[4];
  for (long slot = 0; slot < slots; slot++) {
    __m512 sum[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(),
                     _mm512_setzero_ps()};
    for (long at = 0; at < value_size; at += STEP)  // read in steps that no core foresees
      _mm_prefetch((const char *)(value + slot * value_step + at), _MM_HINT_T0);
    for (long at = 0; at < size; at += STEP) {
      _mm_prefetch((const char *)(key + (slot + AHEAD) * key_step + at), _MM_HINT_T0);
      __m512bh keys = (__m512bh)_mm512_loadu_si512(key + slot * key_step + at);
      for (int row = 0; row < rows; row++)
        sum[row] = _mm512_dpbf16_ps(sum[row], (__m512bh)_mm512_loadu_si512(query[row] + at), keys);
    }
    for (int row = 0; row < rows; row++)
      scores[row * padded + slot] = _mm512_reduce_add_ps(sum[row]);
  }
  for (int row = 0; row < rows; row++) {
    float *line = scores + row * padded;
    __m512 largest = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (long slot = slots; slot < padded; slot++) line[slot] = -INFINITY;
    for (long slot = 0; slot < padded; slot += 16) {
      __mmask16 there = slots - slot >= 16 ? 0xffff : (1 << (slots - slot)) - 1;
      __m512 now = _mm512_mul_ps(_mm512_loadu_ps(line + slot), _mm512_set1_ps(scale));
      if (mask[row]) {
        __m256i bits = _mm256_maskz_loadu_epi16(there, mask[row] + slot);
        now = _mm512_add_ps(now, _mm512_castsi512_ps(
                                     _mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)));
      }
      _mm512_storeu_ps(line + slot, now);
      largest = _mm512_max_ps(largest, now);
    }
    most[row] = _mm512_reduce_max_ps(largest);
    for (long slot = 0; slot < padded; slot += 16) {
      __m512 now = _ZGVeN16v_expf(
          _mm512_sub_ps(_mm512_loadu_ps(line + slot), _mm512_set1_ps(most[row])));
      _mm512_storeu_ps(line + slot, now);
      sum = _mm512_add_ps(sum, now);
    }
    total[row] = _mm512_reduce_add_ps(sum);
  }
  for (long at = 0; at < value_size; at += STEP) {
    __m512 sum[4][2];
    for (int row = 0; row < rows; row++) sum[row][0] = sum[row][1] = _mm512_setzero_ps();
    for (long slot = 0; slot < slots; slot++) {
      const bf16 *from = value + slot * value_step + at;
      __m512 low = wide(from), high = wide(from + 16);
      for (int row = 0; row < rows; row++) {
        __m512 share = _mm512_set1_ps(scores[row * padded + slot]);
        sum[row][0] = _mm512_fmadd_ps(share, low, sum[row][0]);
        sum[row][1] = _mm512_fmadd_ps(share, high, sum[row][1]);
      }
    }
    for (int row = 0; row < rows; row++)
      for (int half = 0; half < 2; half++)
        _mm256_storeu_si256((__m256i *)(out[row] + at + 16 * half),
                            narrow(_mm512_div_ps(sum[row][half], _mm512_set1_ps(total[row]))));
  }
}

// What attention reads and writes: query and out are [batch, nodes, heads * group, size], keys,
// values and masks have steps of their own. Sizes are multiples of 32.
typedef struct {
  const bf16 *query, *key, *value, *mask;
  bf16 *out;
  long batch, nodes, heads, group, slots, size, value_size;
  long key_steps[3], value_steps[3], mask_steps[2];  // text, head, slot; text, node
  float scale;
} Attention;

// By all threads of a team.
static void attend_in_team(const Attention *now) {
  long rows = now->nodes * now->group, parts = (rows + 3) / 4;
  float *scores = aligned_alloc(64, 4 * ((now->slots + 15) / 16 * 16) * sizeof(float));
#pragma omp for schedule(static)
  for (long task = 0; task < now->batch * now->heads * parts; task++) {
    long part = task % parts, head = task / parts % now->heads, text = task / parts / now->heads;
    const bf16 *from[4], *hidden[4];
    bf16 *to[4];
    int count = rows - 4 * part < 4 ? rows - 4 * part : 4;
    for (int each = 0; each < count; each++) {
      long row = 4 * part + each, node = row / now->group;
      long place = (text * now->nodes + node) * now->heads * now->group + head * now->group +
                   row % now->group;
      from[each] = now->query + place * now->size, to[each] = now->out + place * now->value_size;
      hidden[each] =
          now->mask ? now->mask + text * now->mask_steps[0] + node * now->mask_steps[1] : NULL;
    }
    const bf16 *keys = now->key + text * now->key_steps[0] + head * now->key_steps[1];
    const bf16 *values = now->value + text * now->value_steps[0] + head * now->value_steps[1];
#define ROWS(count)                                                                            \
  attend_rows(count, from, keys, values, now->key_steps[2], now->value_steps[2], now->slots,   \
              now->size, now->value_size, now->scale, hidden, to, scores)
    if (count == 1) ROWS(1);
    else if (count == 2) ROWS(2);
    else if (count == 3) ROWS(3);
    else ROWS(4);
  }
  free(scores);
}

void attend(const Attention *attention, int threads) {
#pragma omp parallel num_threads(threads)
  attend_in_team(attention);
}

// A decoder layer of a Llama on states [rows, in], in one piece: norms, attention with what it
// writes to the cache, and the gated product. weights are those of the norms, of queries, keys,
// values and output, of gate, up and down; biases are of the last seven, or NULL. Of attention,
// query and out are not given. New keys and values go to slots [batch, nodes], counted through all
// texts, or where slots is NULL to those from first on.
void decoder_layer(const bf16 *states, bf16 *out, const bf16 *const *weights,
                   const bf16 *const *biases, float eps, float other_eps, long in, long inner,
                   const bf16 *cos, const bf16 *sin, const Attention *given, const int64_t *slots,
                   long first_slot, int threads) {
  Attention now = *given;
  long rows = now.batch * now.nodes, size = now.size, heads = now.heads * now.group;
  long asked = heads * size, kept = now.heads * size, widest = inner > asked ? inner : asked;
  long numbers = rows * (2 * in + 2 * asked + 2 * kept + inner);
  bf16 *space = aligned_alloc(64, (numbers + 31) / 32 * 64);
  bf16 *normed = space, *middle = normed + rows * in, *query = middle + rows * in;
  bf16 *found = query + rows * asked, *key = found + rows * asked, *value = key + rows * kept;
  bf16 *gated = value + rows * kept;
  uint32_t *pairs = scratch_of_pairs(rows, widest > in ? widest : in);
  Layer first[3] = {{weights[2], biases[0], query, asked}, {weights[3], biases[1], key, kept},
                    {weights[4], biases[2], value, kept}};
  Layer output = {weights[5], biases[3], middle, in}, down = {weights[8], biases[6], out, in};
  Layer both[2] = {{weights[6], biases[4], gated, inner}, {weights[7], biases[5], gated, inner}};
  now.query = query, now.out = found;
#pragma omp parallel num_threads(threads)
  {
    if (rows > 1) set_tiles();
#pragma omp for
    for (long row = 0; row < rows; row++)
      norm_row(states + row * in, weights[0], normed + row * in, in, eps);
    product(first, 3, 0, NULL, normed, pairs, rows, in);
#pragma omp for
    for (long task = 0; task < rows * (heads + now.heads); task++) {
      long row = task / (heads + now.heads), head = task % (heads + now.heads) - now.heads;
      const bf16 *c = cos + row * size, *s = sin + row * size;
      if (head >= 0) {
        bf16 *mine = query + row * asked + head * size;
        rotate_head(mine, c, s, mine, size);
        continue;
      }
      head += now.heads;
      long text = row / now.nodes, slot = first_slot + row % now.nodes;
      long from = row * kept + head * size;
      if (slots) text = 0, slot = slots[row];
      const long *k = now.key_steps, *v = now.value_steps;
      bf16 *new_key = (bf16 *)now.key + text * k[0] + head * k[1] + slot * k[2];
      bf16 *new_value = (bf16 *)now.value + text * v[0] + head * v[1] + slot * v[2];
      rotate_head(key + from, c, s, new_key, size);
      memcpy(new_value, value + from, size * sizeof(bf16));
    }
    attend_in_team(&now);
    product(&output, 1, 0, states, found, pairs, rows, asked);
#pragma omp for
    for (long row = 0; row < rows; row++)
      norm_row(middle + row * in, weights[1], normed + row * in, in, other_eps);
    product(both, 2, 1, NULL, normed, pairs, rows, in);
    product(&down, 1, 0, middle, gated, pairs, rows, inner);
    if (rows > 1) _tile_release();
  }
  free(pairs);
  free(space);
}
