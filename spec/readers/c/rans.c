/* The entropy coder (rans.md). */
#include "kvpack.h"

/* Read a table: `table` gets f and b of every symbol by turns, and `slots` the symbol of each of 4096 slots.
 */
void kv_rans_table(kv_reader *reader, const uint8_t *frequencies, unsigned symbols, uint16_t *table,
                   uint8_t *slots) {
    unsigned sum = 0;
    for (unsigned s = 0; s < symbols; s++) {
        unsigned f = (unsigned)kv_little(frequencies + 2 * s, 2);
        if (f > 4096 || sum + f > 4096)
            kv_fail(reader, INVALID_PAYLOAD, "rans-1", "frequencies do not sum to 4096");
        table[2 * s] = (uint16_t)f;
        table[2 * s + 1] = (uint16_t)sum;
        for (; f; f--) slots[sum++] = (uint8_t)s;
    }
    if (sum != 4096) kv_fail(reader, INVALID_PAYLOAD, "rans-1", "frequencies sum to %u, not 4096", sum);
}

/* Decode a segment whose table changes after every `per_table` symbols; returns the coder words it took. */
uint64_t kv_rans(kv_reader *reader, const uint8_t *states, kv_bytes words, uint64_t count,
                 const uint16_t *const *tables, const uint8_t *const *slots, uint64_t per_table,
                 uint8_t *symbols) {
    uint32_t lanes[32];
    uint64_t taken = 0;
    for (int i = 0; i < 32; i++) {
        lanes[i] = (uint32_t)kv_little(states + 4 * i, 4);
        if (lanes[i] < 65536) kv_fail(reader, INVALID_PAYLOAD, "rans-2", "a first state is %u", lanes[i]);
    }
    for (uint64_t i = 0; i < count; i++) {
        uint32_t x = lanes[i % 32], slot = x % 4096;
        const uint16_t *table = tables[i / per_table];
        uint8_t s = slots[i / per_table][slot];
        x = table[2 * s] * (x / 4096) + slot - table[2 * s + 1];
        if (x < 65536) {
            if (2 * taken + 2 > words.size)
                kv_fail(reader, INVALID_PAYLOAD, "rans-3", "symbols take more words than there are");
            x = x << 16 | (uint32_t)kv_little(words.data + 2 * taken++, 2);
        }
        lanes[i % 32] = x;
        symbols[i] = s;
    }
    for (int i = 0; i < 32; i++)
        if (lanes[i] != 65536) kv_fail(reader, INVALID_PAYLOAD, "rans-4", "a last state is %u", lanes[i]);
    return taken;
}
