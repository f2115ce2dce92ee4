// A layer of experts with 8-bit weights and activations: rows of x become codes, go to the places of their pairs, sorted by expert,
// and through two products of rows in groups (gemm/scaled_mm.h), with an activation and codes again between; then each token's
// are summed.
//
// Rows behind the token's are those of places: an expert's lie one after another.  Pairs that are dropped have none.
#pragma once

#include "activation/named_activation.h"
#include "gemm/scaled_mm.h"
#include "moe/code_records.h"
#include "moe/sort_pairs.h"
#include "moe/sum_rows.h"
#include "quantization/group_quant.h"
#include "quantization/row_quant.h"
#include "quantization/static_quant.h"

namespace pykv {

// Pieces of workspace begin at multiples of 256 bytes.
struct QuantisedWorkspace {
  int64_t offsets, sorted, places, scale, tokens, pairs, rows, activated, codes, bytes;

  QuantisedWorkspace(int64_t num_tokens, int64_t num_pairs, int64_t num_experts, int64_t width, int64_t inner,
                     int64_t hidden) {
    int64_t at = 0;
    const auto place = [&](int64_t size) {
      const int64_t begin = at;
      at += (size + 255) / 256 * 256;
      return begin;
    };
    const RecordLayout of_x(hidden, true), of_activated(inner, true);
    offsets = place(4 * (num_experts + 1));
    sorted = place(4 * num_pairs);
    places = place(4 * num_pairs);
    scale = place(4);
    tokens = place(num_tokens * of_x.bytes);
    pairs = place(num_pairs * of_x.bytes);
    rows = place(2 * num_pairs * (width > hidden ? width : hidden));  // of the first product, then of the second
    activated = place(2 * num_pairs * inner);
    codes = place(num_pairs * of_activated.bytes);
    bytes = at;
  }
};

// How rows become codes: by scales of groups, of rows, or by one that is given.
enum class RowCoding : uint8_t { kGroups, kRows, kNumber };

struct RowCoder {
  RowCoding way;
  GroupQuantArgs groups;
  RowQuantArgs rows;
  StaticQuantArgs number;
};

struct QuantisedMoeArgs {
  SortPairsArgs sort;
  RowCoder first_coder, second_coder;
  CodeRecordsArgs records;
  ScaledMmArgs first, second;
  const NamedActivation* activation;
  GatedActivationArgs gated;
  ElementwiseActivationArgs elementwise;
  SumRowsArgs sum;
  bool in_blocks;
  void* workspace;  // null: on CUDA it comes from the stream-ordered pool, on the CPU from the heap
  int64_t workspace_bytes;

  // The activation is part of what makes codes.
  bool activates_in_coder() const { return second_coder.groups.source == RowSource::kSiluAndMul; }
  // Says where all lies between the kernels.
  void use(void* memory);
};

// What the layer is made of, on one device.
struct QuantisedMoeTwins {
  Twin<SortPairsArgs> sort;
  Twin<GroupQuantArgs> groups;
  Twin<RowQuantArgs> rows;
  Twin<StaticQuantArgs> number;
  Twin<CodeRecordsArgs> records;
  Twin<ScaledMmArgs> multiply;
  Twin<SumRowsArgs> sum;
  bool (*block_records)(const BlockRecordsArgs& args, const Launch& launch);  // null: there is none
  bool on_cuda;
};
void run_quantised_moe(const QuantisedMoeArgs& args, const QuantisedMoeTwins& twins, const Launch& launch);

void quantised_moe_cpu(const QuantisedMoeArgs& args, const Launch& launch);
void quantised_moe_cuda(const QuantisedMoeArgs& args, const Launch& launch);

}  // namespace pykv
