// Sixteen outputs of a layer for up to 64 rows, from weights [outputs, in] as torch keeps them.
#include "cpu_vectors.h"

enum { LINES = 16, STEP = 32 };  // outputs at once; what `in` is a multiple of

#ifdef __AVX512F__
enum { MOST = 6 };  // rows at once, whose sums fill the registers
#elif defined(FLOAT32)
enum { MOST = 3 };
#else
enum { MOST = 2 };
#endif

#ifdef __AMX_BF16__
#define FETCH(address) _mm_prefetch((const char *)(address), _MM_HINT_T0)
#else  // Zen's first cache waits for few lines at once
#define FETCH(address) _mm_prefetch((const char *)(address), _MM_HINT_T1)
#endif

// Four lines, of weights or keys, with some rows; sums [rows, apart]. The next four are fetched.
INLINED void four_lines(const int rows, const number *lines, long step, const state *states,
                        long in, float *sums, long apart) {
  floats sum[4][MOST];
  for (int each = 0; each < 4; each++)
    for (int row = 0; row < rows; row++) sum[each][row] = all(0);
  for (long at = 0; at < in; at += SPAN) {
#pragma GCC unroll 4
    for (int each = 0; each < 4; each++) {
      FETCH(lines + (4 + each) * step + at);
      piece numbers = piece_of(lines + each * step + at);
#pragma GCC unroll 6
      for (int row = 0; row < rows; row++)
        sum[each][row] = plus(sum[each][row], numbers, states + row * in + at);
    }
  }
#pragma GCC unroll 6
  for (int row = 0; row < rows; row++)
    _mm_storeu_ps(sums + row * apart, sums_of(sum[0][row], sum[1][row], sum[2][row], sum[3][row]));
}

#ifndef __AMX_BF16__
// Four outputs of one row. Lines of weights are read one after the other, as a core fetches ahead
// by itself: with one row nothing is gained by reading four at once.
static void four_outputs_of_one(const number *weight, const state *states, long in, float *sums) {
  floats found[4];
#pragma GCC unroll 4
  for (int each = 0; each < 4; each++) {
    const number *line = weight + each * in;
    floats sum[4] = {all(0), all(0), all(0), all(0)};
    long at = 0;
    for (; at + 4 * SPAN <= in; at += 4 * SPAN)
#pragma GCC unroll 4
      for (int part = 0; part < 4; part++) {
        long now = at + part * SPAN;
        sum[part] = plus(sum[part], piece_of(line + now), states + now);
      }
    for (; at < in; at += SPAN) sum[0] = plus(sum[0], piece_of(line + at), states + at);
    found[each] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }
  _mm_storeu_ps(sums, sums_of(found[0], found[1], found[2], found[3]));
}
#endif

// See four_lines; of any number of rows, in groups that are alike.
static void dots(const number *lines, long step, const state *states, long rows, long in,
                 float *sums, long apart) {
  int groups = (rows + MOST - 1) / MOST;
  for (int group = 0; group < groups; group++) {
    long from = rows * group / groups, to = rows * (group + 1) / groups;
#define OF_ROWS(count)                                                                  \
  case count:                                                                           \
    four_lines(count, lines, step, states + from * in, in, sums + from * apart, apart); break
    switch (to - from) {
      OF_ROWS(1); OF_ROWS(2);
#if defined(__AVX512F__) || defined(FLOAT32)
      OF_ROWS(3);
#endif
#ifdef __AVX512F__
      OF_ROWS(4); OF_ROWS(5); OF_ROWS(6);
#endif
    }
#undef OF_ROWS
  }
}

// Sixteen outputs of some rows, four at a time.
static void by_dots(const number *weight, const state *states, long rows, long in, float *sums) {
  for (int first = 0; first < LINES; first += 4)
#ifndef __AMX_BF16__
    if (rows == 1) four_outputs_of_one(weight + first * in, states, in, sums + first);
    else
#endif
      dots(weight + first * in, in, states, rows, in, sums + first, LINES);
}

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>

// Ask for the use of tiles, which Linux grants a process once; 0 where it does.
int ask_for_tiles(void) { return syscall(SYS_arch_prctl, 0x1023, 18) != 0; }

static void begin_products(long rows) {
  struct { uint8_t palette, start, rest[14]; uint16_t bytes[16]; uint8_t lines[16]; } tiles = {1};
  for (int tile = 0; tile < 6; tile++) tiles.bytes[tile] = 64, tiles.lines[tile] = LINES;
  // Of _tile_loadconfig some compilers believe that it reads eight bytes, and leave out the others.
  if (rows > 1) __asm__ volatile("ldtilecfg %0" : : "m"(tiles));
}

static void end_products(long rows) {
  if (rows > 1) _tile_release();
}

// Bytes in which states of products are laid out.
static long layout_bytes(long rows, long in) {
  return rows > 1 ? (rows + 15) / 16 * 16 * in * sizeof(number) : 0;
}

// States [rows, in] as products read them: for tiles their pairs, transposed. By all threads of a
// team.
static const void *lay_out_rows(const number *states, void *space, long rows, long in) {
  if (rows == 1) return states;
  const uint32_t *from = (const uint32_t *)states;
  long half = in / 2, padded = (rows + 15) / 16 * 16;
#pragma omp for
  for (long first = 0; first < half; first += 16)
    for (long row = 0; row < padded; row++) {
      uint32_t *to = (uint32_t *)space + row / 16 * (half * 16) + row % 16;
      for (long pair = first; pair < first + 16; pair++)
        to[pair * 16] = row < rows ? from[row * half + pair] : 0;
    }
  return space;
}

// Those sixteen lines of weights are one operand of AMX, the states' pairs are the other, so nothing
// of a weight is laid out anew.
static void by_tiles(const number *weight, const uint32_t *pairs, long rows, long in, float *sums) {
  float found[4][LINES * 16] __attribute__((aligned(64)));
  int groups = (rows + 15) / 16;
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  for (long at = 0; at < in; at += STEP) {
    for (int line = 0; line < LINES; line++)
      _mm_prefetch((const char *)(weight + (LINES + line) * in + at), _MM_HINT_T0);
    const uint32_t *states = pairs + at / 2 * 16;
    _tile_loadd(4, weight + at, in * sizeof(number));
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

static void sixteen_outputs(const number *weight, const void *states, long rows, long in,
                            float *sums) {
  if (rows == 1) by_dots(weight, states, rows, in, sums);
  else by_tiles(weight, states, rows, in, sums);
}

#else
int ask_for_tiles(void) { return 0; }
static void begin_products(long rows) {}
static void end_products(long rows) {}

#ifdef LAID_OUT
static long layout_bytes(long rows, long in) { return rows * in * sizeof(float); }

static const void *lay_out_rows(const number *states, void *space, long rows, long in) {
#pragma omp for
  for (long row = 0; row < rows; row++)
    lay_out(states + row * in, (state *)space + row * in, in);
  return space;
}
#else
static long layout_bytes(long rows, long in) { return 0; }

static const void *lay_out_rows(const number *states, void *space, long rows, long in) {
  return states;
}
#endif

static void sixteen_outputs(const number *weight, const void *states, long rows, long in,
                            float *sums) {
  by_dots(weight, states, rows, in, sums);
}
#endif
