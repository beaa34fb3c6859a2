// Numbers as torch keeps them, and vectors of float32 in which all is computed.
//
// Compiled for one type, bfloat16 or with -DFLOAT32 float32, and one instruction set of x86-64:
// AVX-512, with or without products of bfloat16, or AVX2 with FMA.
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#define OF_VECTOR(name) _mm512_##name
typedef __m512 floats;
#else
#define LANES 8
#define OF_VECTOR(name) _mm256_##name
typedef __m256 floats;
#endif

#define UNALIGNED(bytes, least) \
  __attribute__((vector_size(bytes), aligned(least), may_alias))
typedef uint32_t words UNALIGNED(4 * LANES, 4);
typedef int32_t whole_numbers UNALIGNED(4 * LANES, 4);
typedef uint16_t shorts UNALIGNED(2 * LANES, 2);

#define INLINED static inline __attribute__((always_inline))

INLINED floats load(const float *from) { return OF_VECTOR(loadu_ps)(from); }
INLINED void store(float *to, floats values) { OF_VECTOR(storeu_ps)(to, values); }
INLINED floats all(float value) { return OF_VECTOR(set1_ps)(value); }

#ifdef FLOAT32
typedef float number;
INLINED floats wide(const number *from) { return load(from); }
INLINED void keep(number *to, floats values) { store(to, values); }
INLINED floats as_kept(floats values) { return values; }
INLINED void wide_pair(const number *from, floats *pair) {
  pair[0] = load(from), pair[1] = load(from + LANES);
}
INLINED void keep_pair(number *to, const floats *pair) {
  store(to, pair[0]), store(to + LANES, pair[1]);
}
#else
typedef uint16_t number;
INLINED floats wide(const number *from) {
  return (floats)(__builtin_convertvector(*(const shorts *)from, words) << 16);
}
INLINED shorts narrow(floats values) {
#ifdef __AVX512BF16__
  return (shorts)_mm512_cvtneps_pbh(values);
#else  // to the nearest, halfway to even; what is no number stays none
  words bits = (words)values, odd = bits >> 16 & 1, none = (words)(values != values);
  words rounded = (bits + 0x7fff + odd) >> 16;
  return __builtin_convertvector((rounded & ~none) | (0x7fc0 & none), shorts);
#endif
}
INLINED void keep(number *to, floats values) { *(shorts *)to = narrow(values); }
INLINED floats as_kept(floats values) {  // rounded as if it had been stored
  return (floats)(__builtin_convertvector(narrow(values), words) << 16);
}

// Numbers of two vectors at once: the even ones and the odd ones, which takes fewer instructions
// than to make them wide in order. Of float32 they are the first and the last.
INLINED floats even(words numbers) { return (floats)(numbers << 16); }
INLINED floats odd(words numbers) { return (floats)(numbers & 0xffff0000); }
INLINED void wide_pair(const number *from, floats *pair) {
  words numbers = *(const words *)from;
  pair[0] = even(numbers), pair[1] = odd(numbers);
}
INLINED void keep_pair(number *to, const floats *pair) {
  *(words *)to = (words)as_kept(pair[0]) >> 16 | (words)as_kept(pair[1]);
}
#endif

// e to the power of values, but for the last bit: 2^n, for a whole n, times e to the power of a rest
// within half of ln 2, which is a polynomial (that of Cephes). Adding a number so large that no bits
// are left for fractions rounds to n; 2^n is made as two factors, of which each is a normal number.
INLINED floats exp_of(floats values) {
  const floats large = all(0x1.8p23f);
  values = OF_VECTOR(min_ps)(all(89), OF_VECTOR(max_ps)(all(-104), values));  // infinity, and 0
  floats rounded = OF_VECTOR(fmadd_ps)(values, all(1.44269504f), large), n = rounded - large;
  floats rest = values - n * 0.693359375f + n * 2.12194440e-4f;
  floats sum = all(1.9875691500e-4f);
  sum = sum * rest + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * (rest * rest) + (rest + 1);
  whole_numbers power = (whole_numbers)rounded - (whole_numbers)large, half = power >> 1;
  return sum * (floats)((half + 127) << 23) * (floats)((power - half + 127) << 23);
}

INLINED float sum_of(floats values) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps(values);
#else
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#endif
}

INLINED float largest_of(floats values) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps(values);
#else
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#endif
}

// The sums of four vectors.
INLINED __m128 sums_of(floats a, floats b, floats c, floats d) {
#ifdef __AVX512F__
  __m512d ab = (__m512d)(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b));
  __m512d cd = (__m512d)(_mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d));
  floats all = (floats)_mm512_unpacklo_pd(ab, cd) + (floats)_mm512_unpackhi_pd(ab, cd);
  __m256 half = _mm512_castps512_ps256(all) + _mm512_extractf32x8_ps(all, 1);
#else
  __m256 half = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
#endif
  return _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1);
}

// Dot products of weights, or keys, and states: a vector of the former, of SPAN numbers, and what
// states are laid out in for it. Without products of bfloat16 a vector is taken apart into its even
// and its odd numbers, and states, made wide once, are laid out so too.
#ifdef FLOAT32
#define SPAN LANES
typedef float state;
typedef floats piece;
INLINED piece piece_of(const number *from) { return load(from); }
INLINED floats plus(floats sum, piece weights, const state *states) {
  return OF_VECTOR(fmadd_ps)(weights, load(states), sum);
}
#else
#define SPAN (2 * LANES)
typedef words piece;
INLINED piece piece_of(const number *from) { return *(const words *)from; }
#ifdef __AVX512BF16__
typedef number state;
INLINED floats plus(floats sum, piece weights, const state *states) {
  return _mm512_dpbf16_ps(sum, (__m512bh)piece_of(states), (__m512bh)weights);
}
#else
#define LAID_OUT
typedef float state;
INLINED floats plus(floats sum, piece weights, const state *states) {
  sum = OF_VECTOR(fmadd_ps)(even(weights), load(states), sum);
  return OF_VECTOR(fmadd_ps)(odd(weights), load(states + LANES), sum);
}
#endif
#endif

// Numbers [count] as dot products read them.
INLINED void lay_out(const number *from, state *to, long count) {
#ifdef LAID_OUT
  for (long at = 0; at < count; at += SPAN) {
    store(to + at, even(piece_of(from + at)));
    store(to + at + LANES, odd(piece_of(from + at)));
  }
#else
  memcpy(to, from, count * sizeof(number));
#endif
}
