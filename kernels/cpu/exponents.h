/* Splits values of lossless into exponents and words of signs and fractions, and joins them (formats/lossless.py). */

/* Joins the values of one head's tokens, bit for bit. */
static void join_tokens(const Join *call, int64_t head, int64_t start, int64_t stop) {
    int64_t half = call->dim / 2, batch = head / call->heads, of_head = head % call->heads, heads = call->batch * call->heads;
    const char *plane = call->plane.data + batch * call->plane.batch + of_head * call->plane.head;
    char *out = (char *)call->out.data + batch * call->out.batch + of_head * call->out.head;
    for (int64_t token = start; token < stop; token++) {
        const uint8_t *exponents = call->exponents + (token / call->chunk * heads + head) * call->longest + token % call->chunk * call->dim;
        const uint16_t *words = (const uint16_t *)(plane + token * call->plane.row);
        uint16_t *values = (uint16_t *)(out + token * call->out.row);
        for (int64_t c = 0; c < half; c++) values[c] = (uint16_t)((words[c] & 0x80) << 8 | exponents[c] << 7 | (words[c] & 0x7f));
        for (int64_t c = 0; c < half; c++)
            values[half + c] = (uint16_t)((words[c] & 0x8000) | exponents[half + c] << 7 | (words[c] >> 8 & 0x7f));
    }
}

/* Splits the values of one head's tokens. */
static void split_tokens(const Split *call, int64_t head, int64_t start, int64_t stop) {
    int64_t half = call->dim / 2, batch = head / call->heads, of_head = head % call->heads, heads = call->batch * call->heads;
    char *plane = (char *)call->plane.data + batch * call->plane.batch + of_head * call->plane.head;
    for (int64_t token = start; token < stop; token++) {
        uint8_t *exponents = call->exponents + (token / call->chunk * heads + head) * call->longest + token % call->chunk * call->dim;
        const uint16_t *values = (const uint16_t *)row_of(&call->x, batch, of_head, token);
        uint16_t *words = (uint16_t *)(plane + token * call->plane.row);
        for (int64_t c = 0; c < call->dim; c++) exponents[c] = (uint8_t)(values[c] >> 7);
        for (int64_t c = 0; c < half; c++) {
            uint16_t first = values[c], second = values[half + c];
            words[c] = (uint16_t)((first >> 8 & 0x80) | (first & 0x7f) | (second & 0x8000) | (second & 0x7f) << 8);
        }
    }
}

/* Counts the exponents of one head's values. Neighboring values count in separate tables, because equal ones would wait for each other's
   store. */
static void count_exponents(const Split *call, int64_t head) {
    enum { APART_COUNTS = 8 };
    uint32_t counts[APART_COUNTS][256];
    int64_t *found = call->counts + 256 * head;
    memset(found, 0, 256 * sizeof *found);
    for (int64_t first = 0; first < call->tokens; first += 1 << 16) {
        int64_t last = first + (1 << 16) < call->tokens ? first + (1 << 16) : call->tokens;
        memset(counts, 0, sizeof counts);
        for (int64_t token = first; token < last; token++) {
            const uint16_t *values = (const uint16_t *)row_of(&call->x, head / call->heads, head % call->heads, token);
            int64_t c = 0;
            for (; c + APART_COUNTS <= call->dim; c += APART_COUNTS)
                for (int i = 0; i < APART_COUNTS; i++) counts[i][values[c + i] >> 7 & 0xff]++;
            for (; c < call->dim; c++) counts[0][values[c] >> 7 & 0xff]++;
        }
        for (int i = 0; i < APART_COUNTS; i++)
            for (int s = 0; s < 256; s++) found[s] += counts[i][s];
    }
}
