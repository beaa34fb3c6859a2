// The best of scores, and Gumbel noise that is a function of a seed, a position and a token.
#include "cpu_vectors.h"

enum { CHUNK = 4096 };  // scores that a thread takes at once

typedef struct { double score; long place; int none; } Best;  // none: whether one is not a number

static Best better(Best one, Best other) {
  Best found = other.score > one.score ? other : one;
  found.none = one.none | other.none;
  return found;
}

INLINED float as_float(number score) {
#ifdef FLOAT32
  return score;
#else
  uint32_t bits = (uint32_t)score << 16;
  float found;
  memcpy(&found, &bits, sizeof(found));
  return found;
#endif
}

// The best of some scores, the first of equal ones.
static Best best_of(const number *scores, long count) {
  floats most = all(-INFINITY);
  words none = {0};
  float largest = -INFINITY;
  Best found = {-INFINITY, 0, 0};
  long whole = count / LANES * LANES;
  for (long at = 0; at < whole; at += LANES) {
    floats now = wide(scores + at);
    none |= (words)(now != now);
    most = OF_VECTOR(max_ps)(now, most);
  }
  for (int lane = 0; lane < LANES; lane++) found.none |= none[lane] != 0;
  for (long at = whole; at < count; at++) {
    float now = as_float(scores[at]);
    found.none |= now != now;
    largest = now > largest ? now : largest;
  }
  if (found.none) return found;
  largest = fmaxf(largest, largest_of(most));
  found.score = largest;
  while (as_float(scores[found.place]) != largest) found.place++;
  return found;
}

typedef double doubles UNALIGNED(4 * LANES, 8);
typedef uint64_t keys UNALIGNED(4 * LANES, 8);
enum { DOUBLES = LANES / 2 };

// The finalizer of splitmix64.
#define MIX(type)                                              \
  type mixed = (state ^ state >> 30) * 0xbf58476d1ce4e5b9ULL;  \
  mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebULL;       \
  return mixed ^ mixed >> 31
static uint64_t mix(uint64_t state) { MIX(uint64_t); }
INLINED keys mix_all(keys state) { MIX(keys); }
#undef MIX

// The natural logarithm of positive, normal numbers, within one unit of the last place: x = 2^n * m,
// m between the roots of 1/2 and 2, and log m as a series of s = (m - 1) / (m + 1), with a polynomial
// for its end.
INLINED doubles log_of(doubles values) {
  keys bits = (keys)values;
  keys n = (keys)(((int64_t __attribute__((vector_size(4 * LANES))))(bits - 0x3fe6a09e667f3bcdULL)) >> 52);
  doubles f = (doubles)(bits - (n << 52)) - 1, s = f / (2 + f), z = s * s, w = z * z;
  doubles exponent = (doubles)(n + 0x4338000000000000ULL) - 0x1.8p52;  // n as a number
  doubles odd = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 +
                w * 1.531383769920937332e-01));
  doubles even = z * (6.666666666666735130e-01 + w * (2.857142874366239149e-01 +
                 w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
  doubles half = 0.5 * f * f;
  return exponent * 6.93147180369123816490e-01 -
         ((half - (s * (half + odd + even) + exponent * 1.90821492927058770002e-10)) - f);
}

// Standard Gumbel noise of the keys of tokens.
INLINED doubles gumbel(uint64_t row, keys tokens) {
  keys bits = mix_all(row + (tokens + 1) * 0x9e3779b97f4a7c15ULL) >> 12;
  doubles whole = (doubles)(bits | 0x4330000000000000ULL) - 0x1p52;
  return -log_of(-log_of((whole + 0.5) * 0x1p-52));
}

// Scores plus the noise of their tokens, which are those from `first` on where `tokens` is NULL.
static void add_noise(const float *scores, uint64_t row, const int64_t *tokens, long first,
                      uint64_t stream, long count, double *out) {
  for (long at = 0; at < count; at += DOUBLES) {
    long here = count - at < DOUBLES ? count - at : DOUBLES;
    keys own;
    doubles now;
    for (int lane = 0; lane < DOUBLES; lane++) {
      long place = at + (lane < here ? lane : 0);
      own[lane] = tokens ? tokens[place] : first + place;
      now[lane] = scores[place];
    }
    now += gumbel(row, own + stream);
    if (here == DOUBLES) *(doubles *)(out + at) = now;
    else for (int lane = 0; lane < here; lane++) out[at + lane] = now[lane];
  }
}

static Best best_double(const double *scores, long count) {
  Best found = {-INFINITY, 0, 0};
  for (long at = 0; at < count; at++) found.none |= scores[at] != scores[at];
  for (long at = 0; at < count; at++)
    if (scores[at] > found.score) found.score = scores[at], found.place = at;
  return found;
}

// Scores [batch, score_rows, size] and positions [batch, position_rows], of which either is one row
// for all `rows`; seeds [batch], or NULL for no noise; tokens [size], or [batch, rows, size] where each
// row has its own, or NULL for 0, 1, …; out [batch, rows, size], or NULL; best [batch, rows], or NULL.
typedef struct {
  const void *scores;
  const int64_t *seeds, *positions, *tokens;
  double *out;
  int64_t *best;
  long batch, rows, size, score_rows, position_rows, own_tokens, stream, threads;
} Choice;

static Best chosen_in(const Choice *given, long row, long first, long count) {
  long text = row / given->rows, own = row % given->rows;
  long place = text * given->score_rows + (given->score_rows > 1 ? own : 0);
  const number *scores = (const number *)given->scores + place * given->size + first;
  if (!given->seeds) return best_of(scores, count);
#ifdef FLOAT32
  double chunk[CHUNK], *out = given->out ? given->out + row * given->size + first : chunk;
  place = text * given->position_rows + (given->position_rows > 1 ? own : 0);
  uint64_t position = mix((uint64_t)given->positions[place] + 1);
  uint64_t key = mix((uint64_t)given->seeds[text] + position * 0x9e3779b97f4a7c15ULL);
  const int64_t *tokens = given->tokens;
  if (tokens) tokens += first + (given->own_tokens ? row * given->size : 0);
  add_noise(scores, key, tokens, first, given->stream, count, out);
  if (given->best) return best_double(out, count);
#endif
  return (Best){-INFINITY, 0, 0};
}

// Choose tokens, the first of equal ones: -1 where a score is not a number, or, of noisy ones, where
// the best is infinite. Or write noisy scores. With noise scores are float32.
void choose(const Choice *given) {
  long rows = given->batch * given->rows, chunks = (given->size + CHUNK - 1) / CHUNK;
  Best *found = malloc(rows * chunks * sizeof(Best));
#pragma omp parallel for num_threads(given->threads) schedule(static)
  for (long task = 0; task < rows * chunks; task++) {
    long first = task % chunks * CHUNK, left = given->size - first;
    found[task] = chosen_in(given, task / chunks, first, left < CHUNK ? left : CHUNK);
    found[task].place += first;
  }
  for (long row = 0; given->best && row < rows; row++) {
    Best best = found[row * chunks];
    for (long chunk = 1; chunk < chunks; chunk++) best = better(best, found[row * chunks + chunk]);
    int bad = best.none || (given->seeds && isinf(best.score));
    given->best[row] = bad ? -1 : best.place;
  }
  free(found);
}
