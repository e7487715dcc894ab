/* Weights that are whole numbers of 4 or 8 bits, as a quantised checkpoint has them: linear maps of few rows wait for weights to come from
   memory, and these are a fifth of the bytes. blocks.py says what a block is: a scale and an offset, then codes. A weight is code * scale +
   offset, which in float is the very number that the plain weight is. A checkpoint in bfloat16 is half of the bytes of float. */

enum { NIBBLES = 3, BYTES = 5, SHORT = 6, HALVES = 8 }; /* bytes of four weights; SHORT: bytes in blocks of 16; HALVES: bfloat16 */

typedef uint8_t codes_vec __attribute__((vector_size(WIDTH)));

static inline ints numbers(const uint8_t *codes) {
#ifdef WIDE
    return (ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
#elif defined(__AVX2__) && WIDTH == 8
    return (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)codes));
#else
    codes_vec c;
    memcpy(&c, codes, sizeof c);
    return __builtin_convertvector(__builtin_convertvector(c, half_vec), ints); /* in one step gcc would take them one by one */
#endif
}

#ifdef WIDE
/* What each of the sixteen means. */
static inline vec nibbles_of(float scale, float offset) {
    return (vec){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} * scale + offset;
}
#endif

/* Weights u * WIDTH and on of a block. The first 16 of 32 nibbles are the lower halves of bytes; a byte is 128 more than it means. */
ALWAYS vec weights_of(int kind, const uint8_t *block, int u) {
    if (kind == HALVES) {
        half_vec upper;
        memcpy(&upper, block + u * sizeof upper, sizeof upper);
        return (vec)(__builtin_convertvector(upper, bits_vec) << 16);
    }
    float scale, offset;
    memcpy(&scale, block, 4);
    memcpy(&offset, block + 4, 4);
    block += 8;
    if (kind != NIBBLES) return __builtin_convertvector(numbers(block + u * WIDTH) - 128, vec) * scale + offset;
    ints both = numbers(block + u * WIDTH % 16);
#ifdef WIDE /* the lower four bits choose one of sixteen */
    return (vec)_mm512_permutexvar_ps((__m512i)(u ? both >> 4 : both), (__m512)nibbles_of(scale, offset));
#else
    return __builtin_convertvector(u * WIDTH < 16 ? both & 15 : both >> 4, vec) * scale + offset;
#endif
}
