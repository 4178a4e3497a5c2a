/* Bit packing, the generator, rotations and norms of 8 bits (packing.md). */
#include "kvpack.h"

#include <math.h>
#include <string.h>

static bool is_power(uint64_t number) { return !(number & (number - 1)); }

static unsigned log_of(uint64_t power) {
    unsigned bits = 0;
    while (power >>= 1) bits++;
    return bits;
}

/* Compute the columns, bytes and planes of a packing; false if it exceeds a limit (rule front-5). */
bool kv_pack_sizes(kv_packing *p) {
    bool powers = true;
    unsigned bits = 0;
    if (p->fields < 1 || p->fields > 128) return false;
    for (unsigned d = 0; d < p->digits; d++) {
        if (p->base[d] < 2 || p->base[d] > 65536) return false;
        powers = powers && is_power(p->base[d]);
        bits += p->fields * log_of(p->base[d]);
    }
    if (powers) {
        p->bytes = (bits + 7) / 8;
    } else {
        uint64_t values = 1;
        for (unsigned d = 0; d < p->digits; d++)
            for (unsigned k = 0; k < p->fields; k++)
                if ((values = kv_times(values, p->base[d])) > (uint64_t)1 << 53) return false;
        p->bytes = 0;
        for (uint64_t most = values - 1; most; most >>= 8) p->bytes++;
    }
    if (p->bytes > 16) return false;
    p->columns = (p->symbols + p->fields - 1) / p->fields;
    p->planes = (p->bytes + 1) / 2;
    return true;
}

/* The bytes of a row of one digit at the default F, which takes the fewest. */
uint64_t kv_default_bytes(unsigned symbols, unsigned base) {
    uint64_t least = UINT64_MAX;
    for (unsigned fields = 1; fields <= symbols && fields <= 128; fields++) {
        kv_packing p = {
            .symbols = symbols, .digits = 1, .fields = fields, .base = {base}, .alphabet = {base}};
        if (!kv_pack_sizes(&p)) break;
        uint64_t bytes = 2 * ((uint64_t)p.columns * (p.bytes / 2) + (p.columns + 1) / 2 * (p.bytes % 2));
        least = bytes < least ? bytes : least;
    }
    return least;
}

/* Put the digit of field k of a column in its place, after the checks of digits. */
static void place(kv_reader *reader, const kv_packing *p, unsigned d, unsigned k, unsigned column,
                  uint64_t digit, uint32_t *digits) {
    unsigned symbol = k * p->columns + column;
    if (symbol >= p->symbols) {
        if (digit)
            kv_fail(reader, INVALID_PAYLOAD, "front-3", "a field of %s without a symbol is not zero",
                    p->name);
        return;
    }
    if (digit >= p->alphabet[d])
        kv_fail(reader, INVALID_PAYLOAD, "front-2", "a digit of %s is %llu", p->name,
                (unsigned long long)digit);
    digits[d * p->symbols + symbol] = (uint32_t)digit;
}

/* The digits of a row: those of digit 0 of all symbols, then those of digit 1. */
void kv_unpack(kv_reader *reader, const kv_packing *p, const uint8_t *const planes[], uint64_t row,
               uint32_t *digits) {
    unsigned half = (p->columns + 1) / 2, last = p->planes - 1;
    bool odd = p->bytes % 2, powers = true;
    for (unsigned d = 0; d < p->digits; d++) powers = powers && is_power(p->base[d]);
    if (odd && p->columns % 2 && planes[last][2 * (row * half + half - 1) + 1])
        kv_fail(reader, INVALID_PAYLOAD, "front-4", "the last byte of a row of %s is not zero", p->name);
    for (unsigned c = 0; c < p->columns; c++) {
        uint64_t words[3] = {0, 0, 0};
        uint8_t bytes[17] = {0};
        for (unsigned plane = 0; plane < p->bytes / 2; plane++)
            memcpy(bytes + 2 * plane, planes[plane] + 2 * (row * p->columns + c), 2);
        if (odd) bytes[p->bytes - 1] = planes[last][2 * (row * half + c % half) + c / half];
        words[0] = kv_little(bytes, 8);
        words[1] = kv_little(bytes + 8, 8);
        unsigned at = 0;
        for (unsigned d = 0; d < p->digits; d++) {
            unsigned width = log_of(p->base[d]);
            for (unsigned k = 0; k < p->fields; k++) {
                uint64_t digit;
                if (powers) {
                    digit = words[at / 64] >> at % 64;
                    if (at % 64 && at / 64 < 1) digit |= words[1] << (64 - at % 64);
                    digit &= p->base[d] - 1;
                    at += width;
                } else {
                    digit = words[0] % p->base[d];
                    words[0] /= p->base[d];
                }
                place(reader, p, d, k, c, digit, digits);
            }
        }
        bool left = powers ? (at < 64 ? words[0] >> at || words[1] : at < 128 && words[1] >> (at - 64))
                           : words[0] > 0;
        if (left)
            kv_fail(reader, INVALID_PAYLOAD, "front-4", "a column of %s is above its largest value", p->name);
    }
}

uint64_t kv_generate(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static double symmetric(uint64_t *state) { return ((double)(kv_generate(state) >> 11) - 0x1p52) / 0x1p52; }

static double disc(uint64_t *state, double point[2]) {
    for (;;) {
        point[0] = symmetric(state);
        point[1] = symmetric(state);
        /* Each operation is rounded: nothing may fuse them. */
        volatile double a = point[0] * point[0], b = point[1] * point[1];
        volatile double q = a + b;
        if (q > 0 && q < 1) return q;
    }
}

void kv_quaternion(uint64_t *state, double quaternion[4]) {
    double q1 = disc(state, quaternion), q2 = disc(state, quaternion + 2);
    double t = sqrt((1 - q1) / q2);
    quaternion[2] *= t;
    quaternion[3] *= t;
}

void kv_signs(uint64_t seed, unsigned count, int8_t *signs) {
    uint64_t word = 0;
    for (unsigned i = 0; i < count; i++, word >>= 1) {
        if (i % 64 == 0) word = kv_generate(&seed);
        signs[i] = word & 1 ? -1 : 1;
    }
}

static unsigned paley_order(unsigned order) {
    static const unsigned orders[] = {1, 12, 20, 28};
    for (int i = 0; order && i < 4; i++)
        if (order % orders[i] == 0 && is_power(order / orders[i])) return orders[i];
    return 0;
}

bool kv_rotates(unsigned order) { return paley_order(order) != 0; }

static int chi(int a, int r) {
    a = (a % r + r) % r;
    for (int k = 1; k < r; k++)
        if (a && k * k % r == a) return 1;
    return a ? -1 : 0;
}

static void paley(unsigned order, int8_t matrix[28][28]) {
    if (order == 1) {
        matrix[0][0] = 1;
        return;
    }
    int r = order == 28 ? 13 : (int)order - 1;
    for (int i = 0; i <= r; i++)
        for (int j = 0; j <= r; j++) {
            int c = i && j ? chi(i - j, r) : order == 28 ? i != j : i && !j ? -1 : 1;
            if (order != 28) {
                matrix[i][j] = (int8_t)(i && i == j ? 1 : c);
                continue;
            }
            matrix[2 * i][2 * j] = (int8_t)(c ? c : 1);
            matrix[2 * i][2 * j + 1] = (int8_t)(c ? c : -1);
            matrix[2 * i + 1][2 * j] = (int8_t)(c ? c : -1);
            matrix[2 * i + 1][2 * j + 1] = (int8_t)(c ? -c : -1);
        }
}

/* x_j = s_j / sqrt(order) times the sum of H_ij u_i; `signs` may be NULL. */
void kv_rotate_back(const double *u, double *x, unsigned order, const int8_t *signs) {
    unsigned m = paley_order(order);
    int8_t matrix[28][28];
    paley(m, matrix);
    for (unsigned i = 0; i < order; i += m)
        for (unsigned q = 0; q < m; q++) {
            double sum = 0;
            for (unsigned p = 0; p < m; p++) sum += matrix[p][q] * u[i + p];
            x[i + q] = sum;
        }
    for (unsigned step = m; step < order; step *= 2)
        for (unsigned i = 0; i < order; i++)
            if (!(i / step & 1)) {
                double a = x[i], b = x[i + step];
                x[i] = a + b;
                x[i + step] = a - b;
            }
    for (unsigned j = 0; j < order; j++) x[j] *= (signs ? signs[j] : 1) / sqrt(order);
}

float kv_norm8(uint8_t code) {
    static const uint32_t sixteenths[16] = {
        0x3f800000, 0x3f85aac3, 0x3f8b95c2, 0x3f91c3d3, 0x3f9837f0, 0x3f9ef532, 0x3fa5fed7, 0x3fad583f,
        0x3fb504f3, 0x3fbd08a4, 0x3fc5672a, 0x3fce248c, 0x3fd744fd, 0x3fe0ccdf, 0x3feac0c7, 0x3ff5257d};
    return code ? ldexpf(kv_float(sixteenths[(code - 1) % 16]), (code - 1) / 16 - 7) : 0;
}
