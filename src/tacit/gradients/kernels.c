/* What one unit's outer products add up to, and their norm, without writing either to memory.

   Compiled at first use where there is a C compiler (see _kernels.py); without one the same is done by torch. Both have
   the same bounds: numbers of one unit are multiplied in float, in runs whose rounding the norms allow for, and units
   are added up in double. How the output is cut, and over how many threads, changes no entry's arithmetic. */

#include <math.h>
#include <stddef.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef ptrdiff_t size;
#define APART _Thread_local /* half a megabyte is more than some threads' stacks have: each has it elsewhere */
#ifdef __AVX512F__
enum { LANES = 16, HIGH = 8 }; /* 32 registers */
#else
enum { LANES = 8, HIGH = 4 };
#endif
enum { WIDE = 3 * LANES, ROWS = 192, COLUMNS = 192, LONGEST = 128, TERMS = 1024, RUN = 4096 };
typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef float unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline lanes load(const float *from) {
    lanes found = (lanes) * (const unaligned *)from;
#ifdef __AVX512F__
    __asm__("" : "+v"(found)); /* in a register: read once, not once for each product */
#elif defined(__AVX__)
    __asm__("" : "+x"(found));
#endif
    return found;
}

enum { HALF = LANES / 2, SPAN = 3 * HALF, TALL = 128, AHEAD = 2048 };
typedef double doubles __attribute__((vector_size(8 * HALF)));

/* So many floats from here on, as doubles, and the sum of so many doubles; GCC's own code for the first with eight
   lanes is three shuffles. */
#ifdef __AVX512F__
static inline doubles widened(const float *from) { return (doubles)_mm512_cvtps_pd(_mm256_loadu_ps(from)); }
static inline double together(doubles values) { return _mm512_reduce_add_pd((__m512d)values); }
#else
static inline doubles widened(const float *from) {
    typedef float halves __attribute__((vector_size(4 * HALF)));
    halves found;
    memcpy(&found, from, sizeof found);
    return __builtin_convertvector(found, doubles);
}
static inline double together(doubles values) { return (values[0] + values[1]) + (values[2] + values[3]); }
#endif

/* out (HIGH x WIDE) = sum over t of a[t]^T b[t]. */
static void tile(const float *restrict a, const float *restrict b, size length, float *restrict out) {
    lanes sums[HIGH][WIDE / LANES] = {{{0}}};
    for (size t = 0; t < length; t++) {
        const lanes b0 = load(b), b1 = load(b + LANES), b2 = load(b + 2 * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < HIGH; i++) {
            sums[i][0] += a[i] * b0;
            sums[i][1] += a[i] * b1;
            sums[i][2] += a[i] * b2;
        }
        a += HIGH;
        b += WIDE;
    }
    memcpy(out, sums, sizeof sums);
}

/* Positions of some columns, a panel of `wide` columns after the other; zeros beyond the last column. */
static inline __attribute__((always_inline)) void pack(const float *from, size step, size length, size columns,
                                                       size wide, float *to) {
    for (size first = 0; first < columns; first += wide) {
        const size some = columns - first < wide ? columns - first : wide;
        for (size t = 0; t < length; t++, to += wide) {
            const float *line = from + t * step + first;
            if (some == wide) {
                memcpy(to, line, wide * sizeof *to);
            } else {
                memset(to, 0, wide * sizeof *to);
                memcpy(to, line, some * sizeof *to);
            }
        }
    }
}

/* into (WIDE) += weight * from, in double. */
static inline void add(double *restrict into, const float *restrict from, double weight) {
#pragma GCC unroll 6
    for (int i = 0; i < WIDE; i += HALF) {
        doubles sum;
        memcpy(&sum, into + i, sizeof sum);
        sum += weight * widened(from + i);
        memcpy(into + i, &sum, sizeof sum);
    }
}

/* total[first:last] = sum_n w_n sum_t u_nt v_nt^T, `run` <= LONGEST positions at a time in float; u (rows, positions,
   m), v (rows, positions, k), total (m, k). Rows with skip[n] are not touched. */
static void weighted_sum(const float *u, size u_row, size u_position, const float *v, size v_row, size v_position,
                         const double *weights, const unsigned char *skip, size rows, size positions, size run,
                         size k, size first, size last, double *total) {
    static APART float a[ROWS * LONGEST], b[COLUMNS * LONGEST];
    static APART double sums[ROWS * COLUMNS];
    float product[HIGH * WIDE];
    for (size row = first; row < last; row += ROWS) {
        const size high = last - row < ROWS ? last - row : ROWS;
        for (size column = 0; column < k; column += COLUMNS) {
            const size wide = k - column < COLUMNS ? k - column : COLUMNS;
            memset(sums, 0, sizeof sums);
            for (size n = 0; n < rows; n++) {
                if (skip[n])
                    continue;
                for (size start = 0; start < positions; start += run) {
                    const size length = positions - start < run ? positions - start : run;
                    pack(u + n * u_row + start * u_position + row, u_position, length, high, HIGH, a);
                    pack(v + n * v_row + start * v_position + column, v_position, length, wide, WIDE, b);
                    for (size j = 0; j < wide; j += WIDE)
                        for (size i = 0; i < high; i += HIGH) {
                            tile(a + i * length, b + j * length, length, product);
                            for (int x = 0; x < HIGH; x++)
                                add(sums + (i + x) * COLUMNS + j, product + x * WIDE, weights[n]);
                        }
                }
            }
            for (size i = 0; i < high; i++)
                for (size j = 0; j < wide; j++)
                    total[(row + i) * k + column + j] = sums[i * COLUMNS + j];
        }
    }
}

/* The sums of the lanes of LANES vectors, in their order; lanes are added in pairs, pairs of these and so on. */
#ifdef __AVX512F__
static inline lanes lane_sums(const lanes s[LANES]) {
    __m512 a[2], b[4], c[2];
    for (int i = 0; i < 4; i++) { /* four vectors at a time: each 128 bits of b[i] have one sum of each */
        for (int j = 0; j < 2; j++) {
            const __m512 x = (__m512)s[4 * i + 2 * j], y = (__m512)s[4 * i + 2 * j + 1];
            a[j] = _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
        }
        const __m512d x = _mm512_castps_pd(a[0]), y = _mm512_castps_pd(a[1]);
        b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    for (int i = 0; i < 2; i++)
        c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
    return (lanes)_mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}
#else
static inline lanes lane_sums(const lanes s[LANES]) {
    lanes found;
    for (int i = 0; i < LANES; i++)
        found[i] = ((s[i][0] + s[i][4]) + (s[i][2] + s[i][6])) + ((s[i][1] + s[i][5]) + (s[i][3] + s[i][7]));
    return found;
}
#endif

/* Of positions: DOWN x ACROSS scalar products are formed together, and BLOCK x BLOCK before they are used. */
enum { DOWN = 4, ACROSS = LANES / DOWN, BLOCK = 64 };

/* Where some positions from `first` on begin; zeros stand beyond the last one. */
static inline void positions_from(const float *row, size step, size first, size positions, int count,
                                  const float *where[]) {
    static const float zeros[TERMS];
    for (int i = 0; i < count; i++)
        where[i] = first + i < positions ? row + (first + i) * step : zeros;
}

/* The scalar products of DOWN positions with ACROSS others: a lane at a time, then the lanes, then the rest. */
static inline lanes products_of(const float *const t[DOWN], const float *const s[ACROSS], size width) {
    lanes sums[LANES] = {{0}};
    const size whole = width / LANES * LANES;
    for (size x = 0; x < whole; x += LANES) {
        lanes others[ACROSS];
#pragma GCC unroll 4
        for (int j = 0; j < ACROSS; j++)
            others[j] = load(s[j] + x);
#pragma GCC unroll 4
        for (int i = 0; i < DOWN; i++) {
            const lanes mine = load(t[i] + x);
#pragma GCC unroll 4
            for (int j = 0; j < ACROSS; j++)
                sums[i * ACROSS + j] += mine * others[j];
        }
    }
    lanes found = lane_sums(sums);
    if (whole < width) {
        float rest[LANES];
        memcpy(rest, &found, sizeof rest);
        for (size x = whole; x < width; x++)
            for (int i = 0; i < LANES; i++)
                rest[i] += t[i / ACROSS][x] * s[i % ACROSS][x];
        memcpy(&found, rest, sizeof rest);
    }
    return found;
}

/* The scalar products of a block of positions from t on with one from s on, LANES of them after each other; none whose
   second positions all come after the first. TERMS at a time, and these sums are added in float. */
static void products(const float *row, size step, size width, size positions, size t, size s, float *out) {
    for (size start = 0; start < width; start += TERMS) {
        const size some = width - start < TERMS ? width - start : TERMS;
        float *to = out;
        for (size i = t; i < t + BLOCK && i < positions; i += DOWN) {
            const float *mine[DOWN], *others[ACROSS];
            positions_from(row + start, step, i, positions, DOWN, mine);
            for (size j = s; j < s + BLOCK && j < i + DOWN && j < positions; j += ACROSS, to += LANES) {
                positions_from(row + start, step, j, positions, ACROSS, others);
                const lanes found = products_of(mine, others, some) + (start ? load(to) : (lanes){0});
                memcpy(to, &found, sizeof found);
            }
        }
    }
}

/* For each row n from first to last: found = sum_ts (u_t u_s)(v_t v_s), most = (sum_t |u_t| |v_t|)^2, largest = the
   largest |u_t|^2 or |v_t|^2; every scalar product in float, everything else in double. Each pair of positions once. */
static void ghost(const float *u, size u_row, size u_position, size m, const float *v, size v_row, size v_position,
                  size k, size positions, size first, size last, double *found, double *most, double *largest) {
    float left[BLOCK * BLOCK], right[BLOCK * BLOCK];
    for (size n = first; n < last; n++) {
        doubles pairs = {0};
        double total = 0, sizes = 0, high = 0;
        for (size t = 0; t < positions; t += BLOCK)
            for (size s = 0; s <= t; s += BLOCK) {
                const float *a = left, *b = right;
                products(u + n * u_row, u_position, m, positions, t, s, left);
                products(v + n * v_row, v_position, k, positions, t, s, right);
                for (size i = t; i < t + BLOCK && i < positions; i += DOWN)
                    for (size j = s; j < s + BLOCK && j < i + DOWN && j < positions; j += ACROSS) {
                        if (j + ACROSS <= i) { /* pairs of different positions alone */
                            pairs += widened(a) * widened(b) + widened(a + HALF) * widened(b + HALF);
                        } else {
                            for (int x = 0; x < LANES; x++) {
                                const size down = i + x / ACROSS, over = j + x % ACROSS;
                                const double product = (double)a[x] * (double)b[x];
                                if (over < down) {
                                    total += 2 * product;
                                } else if (over == down) {
                                    total += product;
                                    sizes += sqrt(product);
                                    high = a[x] > high || a[x] != a[x] ? a[x] : high;
                                    high = b[x] > high || b[x] != b[x] ? b[x] : high;
                                }
                            }
                        }
                        a += LANES;
                        b += LANES;
                    }
            }
        found[n] = total + 2 * together(pairs);
        most[n] = sizes * sizes;
        largest[n] = high;
    }
}

/* For each row n from first to last: gain[n] = sum_t g_t * (x_t - mean_t) * rstd_t and shift[n] = sum_t g_t, entry by
   entry, four positions at a time in float; g and x (rows, positions, width), mean and rstd (rows, positions). */
static void norm_sums(const float *g, size g_row, size g_position, const float *x, size x_row, size x_position,
                      const float *mean, const float *rstd, size positions, size width, size first, size last,
                      float *gain, float *shift) {
    for (size n = first; n < last; n++) {
        float *restrict into = gain + n * width, *restrict moved = shift + n * width;
        memset(into, 0, width * sizeof *into);
        memset(moved, 0, width * sizeof *moved);
        size t = 0;
        for (; t + 4 <= positions; t += 4) {
            const float *restrict g0 = g + n * g_row + t * g_position, *restrict x0 = x + n * x_row + t * x_position;
            const float *g1 = g0 + g_position, *g2 = g1 + g_position, *g3 = g2 + g_position;
            const float *x1 = x0 + x_position, *x2 = x1 + x_position, *x3 = x2 + x_position;
            const float *m = mean + n * positions + t, *r = rstd + n * positions + t;
            const float m0 = m[0], m1 = m[1], m2 = m[2], m3 = m[3], r0 = r[0], r1 = r[1], r2 = r[2], r3 = r[3];
#pragma GCC ivdep
            for (size i = 0; i < width; i++) {
                into[i] += (g0[i] * ((x0[i] - m0) * r0) + g1[i] * ((x1[i] - m1) * r1)) +
                           (g2[i] * ((x2[i] - m2) * r2) + g3[i] * ((x3[i] - m3) * r3));
                moved[i] += (g0[i] + g1[i]) + (g2[i] + g3[i]);
            }
        }
        for (; t < positions; t++) {
            const float *gt = g + n * g_row + t * g_position, *xt = x + n * x_row + t * x_position;
            const float m = mean[n * positions + t], r = rstd[n * positions + t];
#pragma GCC ivdep
            for (size i = 0; i < width; i++) {
                into[i] += gt[i] * ((xt[i] - m) * r);
                moved[i] += gt[i];
            }
        }
    }
}

/* sum_i from[i]^2; squares of floats are exact in double, and sums of them neither overflow nor underflow there. Sixteen
   sums side by side, then these, then what is left. */
static inline double squares(const float *restrict from, size width) {
    double sums[16] = {0}, total = 0;
    size i = 0;
    for (; i + 16 <= width; i += 16)
        for (int j = 0; j < 16; j++)
            sums[j] += (double)from[i + j] * (double)from[i + j];
    for (int j = 0; j < 16; j++)
        total += sums[j];
    for (; i < width; i++)
        total += (double)from[i] * (double)from[i];
    return total;
}

/* For each unit n from first to last: out[n] (m, k) = sum_t u_nt v_nt^T in float, `run` <= LONGEST positions at a time and
   these sums one after another, and found[n] = the sum of its squares, in double. */
static void built(const float *u, size u_row, size u_position, size m, const float *v, size v_row, size v_position,
                  size k, size positions, size run, size first, size last, float *out, double *found) {
    static APART float a[ROWS * LONGEST], b[COLUMNS * LONGEST];
    float product[HIGH * WIDE];
    for (size n = first; n < last; n++) {
        float *const mine = out + n * m * k;
        for (size row = 0; row < m; row += ROWS)
            for (size column = 0; column < k; column += COLUMNS) {
                const size high = m - row < ROWS ? m - row : ROWS, wide = k - column < COLUMNS ? k - column : COLUMNS;
                for (size start = 0; start < positions; start += run) {
                    const size length = positions - start < run ? positions - start : run;
                    pack(u + n * u_row + start * u_position + row, u_position, length, high, HIGH, a);
                    pack(v + n * v_row + start * v_position + column, v_position, length, wide, WIDE, b);
                    for (size j = 0; j < wide; j += WIDE)
                        for (size i = 0; i < high; i += HIGH) {
                            const size some = wide - j < WIDE ? wide - j : WIDE;
                            tile(a + i * length, b + j * length, length, product);
                            for (size x = 0; x < HIGH && i + x < high; x++) {
                                float *restrict into = mine + (row + i + x) * k + column + j;
                                for (size y = 0; y < some; y++)
                                    into[y] = start ? into[y] + product[x * WIDE + y] : product[x * WIDE + y];
                            }
                        }
                }
            }
        found[n] = squares(mine, m * k);
    }
}

/* For each row n from first to last: found[n] = sum_i values[n][i]^2. */
static void square_norms(const float *values, size row, size width, size first, size last, double *found) {
    for (size n = first; n < last; n++)
        found[n] = squares(values + n * row, width);
}

/* For each row n from first to last: found[n] = |u_n|^2 |v_n|^2, each factor rounded up as `_norms.square_norms` does it;
   infinite from 1e30 on. */
static void outer_norms(const float *u, size u_row, size m, const float *v, size v_row, size k, size first, size last,
                        double *found) {
    const double more_u = 1 + (double)(m + 8) * 0x1p-53, more_v = 1 + (double)(k + 8) * 0x1p-53;
    const double least_u = (double)m * 0x1p-252, least_v = (double)k * 0x1p-252;
    for (size n = first; n < last; n++) {
        const double a = squares(u + n * u_row, m) * more_u + least_u, b = squares(v + n * v_row, k) * more_v + least_v;
        found[n] = a * b < 1e30 ? a * b : INFINITY;
    }
}

/* For each row n from first to last and each channel c: shift[n][c] = the mean of z and square[n][c] = the mean of z^2,
   less 1, over positions, for z = (x - mean_c) scale_c; x (rows, channels, positions) without gaps, results in lines of
   `step`. Differences, their squares and all sums are double; what leaves is rounded to float. */
static void moments(const float *x, size channels, size positions, const float *mean, const float *scale, size first,
                    size last, float *shift, float *square, size step) {
    const double share = 1.0 / (double)positions;
    for (size n = first; n < last; n++)
        for (size c = 0; c < channels; c++) {
            const float *from = x + (n * channels + c) * positions;
            const double center = mean[c], by = scale[c];
            doubles sums[4] = {{0}}, squared[4] = {{0}};
            size t = 0;
            for (; t + 4 * HALF <= positions; t += 4 * HALF) {
                __builtin_prefetch(from + t + AHEAD); /* the map was just written, and is larger than a core's cache */
                __builtin_prefetch(from + t + AHEAD + 2 * HALF);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    const doubles d = widened(from + t + i * HALF) - center;
                    sums[i] += d;
                    squared[i] += d * d;
                }
            }
            for (; t + HALF <= positions; t += HALF) {
                const doubles d = widened(from + t) - center;
                sums[0] += d;
                squared[0] += d * d;
            }
            double sum = together((sums[0] + sums[1]) + (sums[2] + sums[3]));
            double squares = together((squared[0] + squared[1]) + (squared[2] + squared[3]));
            for (; t < positions; t++) {
                const double d = (double)from[t] - center;
                sum += d;
                squares += d * d;
            }
            shift[n * step + c] = (float)(sum * share * by);
            square[n * step + c] = (float)(squares * share * (by * by) - 1);
        }
}

/* For each row n from first to last and each channel c: shift[n][c] = sum_t g_t and gain[n][c] = scale sum_t g_t (x_t -
   mean) over positions; g and x (rows, channels, positions) without gaps, mean and scale (rows, channels) in lines of
   `step`, 0 if all rows have the same. Differences, products and sums are double; what leaves is rounded to float. */
static void channel_sums(const float *g, const float *x, size channels, size positions, const float *mean,
                         const float *scale, size step, size first, size last, float *gain, float *shift) {
    for (size n = first; n < last; n++)
        for (size c = 0; c < channels; c++) {
            const size place = n * channels + c;
            const float *from = x + place * positions, *by = g + place * positions;
            const double center = mean[n * step + c];
            doubles sums[2] = {{0}}, products[2] = {{0}};
            size t = 0;
            for (; t + 2 * HALF <= positions; t += 2 * HALF) {
                __builtin_prefetch(from + t + AHEAD);
                __builtin_prefetch(by + t + AHEAD);
#pragma GCC unroll 2
                for (int i = 0; i < 2; i++) {
                    const doubles each = widened(by + t + i * HALF);
                    sums[i] += each;
                    products[i] += each * (widened(from + t + i * HALF) - center);
                }
            }
            double sum = together(sums[0] + sums[1]), product = together(products[0] + products[1]);
            for (; t < positions; t++) {
                sum += (double)by[t];
                product += (double)by[t] * ((double)from[t] - center);
            }
            gain[place] = (float)(product * (double)scale[n * step + c]);
            shift[place] = (float)sum;
        }
}

/* out (HIGH x SPAN) += sum over t of a[t]^T b[t], in double. */
static void outer(const double *restrict a, const double *restrict b, size length, double *out, size step) {
    doubles sums[HIGH][3] = {{{0}}};
    for (size t = 0; t < length; t++) {
        doubles b0, b1, b2;
        memcpy(&b0, b, sizeof b0);
        memcpy(&b1, b + HALF, sizeof b1);
        memcpy(&b2, b + 2 * HALF, sizeof b2);
#pragma GCC unroll 8
        for (int i = 0; i < HIGH; i++) {
            sums[i][0] += a[i] * b0;
            sums[i][1] += a[i] * b1;
            sums[i][2] += a[i] * b2;
        }
        a += HIGH;
        b += SPAN;
    }
    for (int i = 0; i < HIGH; i++) {
        const double *from = (const double *)sums[i];
        for (int j = 0; j < SPAN; j++)
            out[i * step + j] += from[j];
    }
}

/* As `pack`, but of rows of a matrix, in double, each multiplied by its weight (1 without weights) or zero. */
static inline __attribute__((always_inline)) void widen(const float *from, size step, const double *weights,
                                                        const unsigned char *skip, size length, size columns,
                                                        size wide, double *to) {
    for (size first = 0; first < columns; first += wide) {
        const size some = columns - first < wide ? columns - first : wide;
        for (size t = 0; t < length; t++, to += wide) {
            const float *line = from + t * step + first;
            const double weight = weights ? weights[t] : 1;
            if (some == wide && !skip[t]) {
                for (size i = 0; i < wide; i++)
                    to[i] = weight * (double)line[i];
            } else {
                for (size i = 0; i < wide; i++)
                    to[i] = i < some && !skip[t] ? weight * (double)line[i] : 0;
            }
        }
    }
}

/* to = from, or += where an earlier run of additions is there already. */
static void settle(double *to, const double *from, size count, int earlier) {
    for (size i = 0; i < count; i++)
        to[i] = earlier ? to[i] + from[i] : from[i];
}

/* total[:, first:last] = sum_n w_n u_n v_n^T, all in double, LONGEST rows at a time and RUN in one run of additions; u
   (rows, m), v (rows, k), total (m, k). Rows with skip[n] are not touched. By columns, for probes have more features
   than classes, and so each thread converts features of its own. */
static void outer_sum(const float *u, size u_row, const float *v, size v_row, const double *weights,
                      const unsigned char *skip, size rows, size m, size k, size first, size last, double *total) {
    static APART double a[TALL * LONGEST], b[COLUMNS * LONGEST], sums[TALL * COLUMNS];
    for (size row = 0; row < m; row += TALL) {
        const size high = m - row < TALL ? m - row : TALL;
        for (size column = first; column < last; column += COLUMNS) {
            const size wide = last - column < COLUMNS ? last - column : COLUMNS;
            for (size run = 0; run < rows; run += RUN) {
                const size end = rows - run < RUN ? rows : run + RUN;
                memset(sums, 0, (high + HIGH - 1) / HIGH * HIGH * COLUMNS * sizeof *sums);
                for (size start = run; start < end; start += LONGEST) {
                    const size length = end - start < LONGEST ? end - start : LONGEST;
                    widen(u + start * u_row + row, u_row, weights + start, skip + start, length, high, HIGH, a);
                    widen(v + start * v_row + column, v_row, NULL, skip + start, length, wide, SPAN, b);
                    for (size j = 0; j < wide; j += SPAN)
                        for (size i = 0; i < high; i += HIGH)
                            outer(a + i * length, b + j * length, length, sums + i * COLUMNS + j, COLUMNS);
                }
                for (size i = 0; i < high; i++)
                    settle(total + (row + i) * k + column, sums + i * COLUMNS, wide, run > 0);
            }
        }
    }
}

/* total[first:last] = sum_n w_n v_n over the rows of a matrix, in double, RUN rows in one run of additions;
   rows with skip[n] are not touched. */
static void row_sum(const float *v, size v_row, const double *weights, const unsigned char *skip, size rows,
                    size first, size last, double *total) {
    for (size column = first; column < last; column += COLUMNS) {
        const size wide = last - column < COLUMNS ? last - column : COLUMNS;
        for (size run = 0; run < rows; run += RUN) {
            const size end = rows - run < RUN ? rows : run + RUN;
            double sums[COLUMNS] = {0};
            for (size n = run; n < end; n++) {
                const float *line = v + n * v_row + column;
                const double weight = weights[n];
                if (skip[n])
                    continue;
                for (size i = 0; i < wide; i++)
                    sums[i] += weight * (double)line[i];
            }
            settle(total + column, sums, wide, run > 0);
        }
    }
}

/* What Python calls: a kernel by what it is given, as one array, and the part of its rows or columns that it does. */
#define FROM(i) ((const float *)given[i])
#define TO(type, i) ((type *)given[i])
#define KERNEL(name, ...)                                                                                               \
    void tacit_##name(const size *given, size first, size last) { name(__VA_ARGS__); }

KERNEL(weighted_sum, FROM(0), given[1], given[2], FROM(3), given[4], given[5], TO(const double, 6),
       TO(const unsigned char, 7), given[8], given[9], given[10], given[11], first, last, TO(double, 12))
KERNEL(ghost, FROM(0), given[1], given[2], given[3], FROM(4), given[5], given[6], given[7], given[8], first, last,
       TO(double, 9), TO(double, 10), TO(double, 11))
KERNEL(built, FROM(0), given[1], given[2], given[3], FROM(4), given[5], given[6], given[7], given[8], given[9], first,
       last, TO(float, 10), TO(double, 11))
KERNEL(norm_sums, FROM(0), given[1], given[2], FROM(3), given[4], given[5], FROM(6), FROM(7), given[8], given[9], first,
       last, TO(float, 10), TO(float, 11))
KERNEL(square_norms, FROM(0), given[1], given[2], first, last, TO(double, 3))
KERNEL(outer_norms, FROM(0), given[1], given[2], FROM(3), given[4], given[5], first, last, TO(double, 6))
KERNEL(moments, FROM(0), given[1], given[2], FROM(3), FROM(4), first, last, TO(float, 5), TO(float, 6), given[7])
KERNEL(channel_sums, FROM(0), FROM(1), given[2], given[3], FROM(4), FROM(5), given[6], first, last, TO(float, 7),
       TO(float, 8))
KERNEL(outer_sum, FROM(0), given[1], FROM(2), given[3], TO(const double, 4), TO(const unsigned char, 5), given[6],
       given[7], given[8], first, last, TO(double, 9))
KERNEL(row_sum, FROM(0), given[1], TO(const double, 2), TO(const unsigned char, 3), given[4], first, last, TO(double, 5))

/* A kernel over the threads that torch has, too, where both have GNU's OpenMP: other threads would wait for those of the
   last operation, which go on turning for a while. */
void tacit_share(void (*kernel)(const size *, size, size), const size *given, size parts, size threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
    for (size i = 0; i < threads; i++)
        kernel(given, parts * i / threads, parts * (i + 1) / threads);
}
