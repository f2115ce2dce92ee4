/* Decoding with a paged KV cache from C99, on host memory: two sequences grow token by token.  Each step writes the new keys
 * and values into blocks, then attends to all of them; a plain loop over the same keys and values says whether it is right. */
#include <math.h>
#include <pykv/kernels.h>
#include <stdio.h>
#include <stdlib.h>

enum {
  SEQS = 2,
  HEADS = 4,
  KV_HEADS = 2,
  HEAD = 32,
  BLOCK = 4,
  WIDTH = 3,
  STEPS = BLOCK * WIDTH,
  BLOCKS = SEQS * WIDTH
};

/* The cache [BLOCKS, BLOCK, KV_HEADS, HEAD], and the same keys and values side by side for the plain loop. */
static float key_cache[BLOCKS][BLOCK][KV_HEADS][HEAD], value_cache[BLOCKS][BLOCK][KV_HEADS][HEAD];
static float keys[SEQS][STEPS][KV_HEADS][HEAD], values[SEQS][STEPS][KV_HEADS][HEAD];

static DLTensor view(void* data, uint8_t code, uint8_t bits, int32_t ndim, int64_t* shape) {
  DLTensor t = {0};
  t.data = data;
  t.device.device_type = kDLCPU;
  t.ndim = ndim;
  t.dtype.code = code;
  t.dtype.bits = bits;
  t.dtype.lanes = 1;
  t.shape = shape; /* strides stay NULL: compact */
  return t;
}

static void check(pykv_status status) {
  if (status == PYKV_OK) return;
  fprintf(stderr, "%s\n", pykv_last_error());
  exit(1);
}

static float noise(void) { return (float)rand() / (float)RAND_MAX * 2 - 1; }

/* softmax(q . k / sqrt(HEAD)) v over the first `length` tokens of a sequence. */
static void attend(float* out, const float* q, int seq, int head, int length) {
  const int kv_head = head / (HEADS / KV_HEADS);
  double sum = 0, total[HEAD] = {0};
  for (int t = 0; t < length; ++t) {
    double logit = 0;
    for (int d = 0; d < HEAD; ++d) logit += q[d] * keys[seq][t][kv_head][d];
    const double weight = exp(logit / sqrt(HEAD)); /* logits are small: no maximum is taken out */
    sum += weight;
    for (int d = 0; d < HEAD; ++d) total[d] += weight * values[seq][t][kv_head][d];
  }
  for (int d = 0; d < HEAD; ++d) out[d] = (float)(total[d] / sum);
}

int main(void) {
  int32_t blocks[SEQS][WIDTH] = {{5, 0, 3}, {1, 4, 2}}, lens[SEQS]; /* blocks of a sequence lie anywhere */
  int64_t slots[SEQS];
  float q[SEQS][HEADS][HEAD], k[SEQS][KV_HEADS][HEAD], v[SEQS][KV_HEADS][HEAD], out[SEQS][HEADS][HEAD];

  int64_t of_cache[] = {BLOCKS, BLOCK, KV_HEADS, HEAD}, of_query[] = {SEQS, HEADS, HEAD};
  int64_t of_key[] = {SEQS, KV_HEADS, HEAD}, of_tables[] = {SEQS, WIDTH}, of_seqs[] = {SEQS};
  DLTensor key_blocks = view(key_cache, kDLFloat, 32, 4, of_cache);
  DLTensor value_blocks = view(value_cache, kDLFloat, 32, 4, of_cache);
  DLTensor query = view(q, kDLFloat, 32, 3, of_query), result = view(out, kDLFloat, 32, 3, of_query);
  DLTensor key = view(k, kDLFloat, 32, 3, of_key), value = view(v, kDLFloat, 32, 3, of_key);
  DLTensor block_tables = view(blocks, kDLInt, 32, 2, of_tables), seq_lens = view(lens, kDLInt, 32, 1, of_seqs);
  DLTensor slot_mapping = view(slots, kDLInt, 64, 1, of_seqs);

  float worst = 0;
  int wrong = 0;
  for (int step = 0; step < STEPS; ++step) {
    for (int s = 0; s < SEQS; ++s) {
      slots[s] = (int64_t)blocks[s][step / BLOCK] * BLOCK + step % BLOCK;
      lens[s] = step + 1;
      for (int h = 0; h < HEADS; ++h)
        for (int d = 0; d < HEAD; ++d) q[s][h][d] = noise();
      for (int h = 0; h < KV_HEADS; ++h)
        for (int d = 0; d < HEAD; ++d) {
          keys[s][step][h][d] = k[s][h][d] = noise();
          values[s][step][h][d] = v[s][h][d] = noise();
        }
    }
    check(pykv_reshape_and_cache_flash(&key, &value, &key_blocks, &value_blocks, &slot_mapping, "auto", NULL, NULL,
                                       NULL));
    /* no options: one query for each sequence, which sees all keys before it */
    check(pykv_paged_attention(&result, &query, &key_blocks, &value_blocks, &block_tables, &seq_lens, NULL, NULL));
    for (int s = 0; s < SEQS; ++s)
      for (int h = 0; h < HEADS; ++h) {
        float wanted[HEAD];
        attend(wanted, q[s][h], s, h, step + 1);
        for (int d = 0; d < HEAD; ++d) {
          const float off = fabsf(out[s][h][d] - wanted[d]);
          if (off > worst) worst = off;
          wrong += !(off < 1e-5f); /* so is a NaN */
        }
      }
  }
  printf("%d tokens of %d sequences; the first output of the last one is %.6f\n", STEPS, SEQS, out[0][0][0]);
  printf("largest difference from a plain loop: %.1e\n", worst);
  if (wrong) fprintf(stderr, "%d numbers are wrong\n", wrong);
  return wrong ? 1 : 0;
}
