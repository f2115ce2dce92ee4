// Twin of code_records.cu: places shared out among threads.
#include <algorithm>
#include <cstring>

#include "cpu/parallel.h"
#include "moe/code_records.h"

namespace pykv::PYKV_ISA {

constexpr int64_t kBytesPerTask = 64 * 1024;  // less is not worth another thread

void code_records_cpu(const CodeRecordsArgs& args, const Launch&) {
  if (args.copies_number) *args.next_scale = args.next_number;
  const RecordLayout& layout = args.layout;
  const int64_t places = std::min<int64_t>(*args.taken, args.num_pairs);
  parallel_for(places, kBytesPerTask / layout.bytes + 1, [&](int64_t begin, int64_t end) {
    for (int64_t place = begin; place < end; ++place) {
      const int64_t pair = args.sorted[place];
      const char* const from = args.tokens + pair / args.top_k * layout.bytes;
      char* const to = args.pairs + place * layout.bytes;
      std::memcpy(to, from, static_cast<size_t>(layout.width));
      std::memset(to + layout.width, 0, static_cast<size_t>(layout.bytes - layout.width));
      const auto* const scales = reinterpret_cast<const float*>(from + layout.scales_at);
      const float factor = args.factor_of(pair);
      for (int64_t i = 0; i < layout.num_scales; ++i)
        reinterpret_cast<float*>(to + layout.scales_at)[i] = (args.is_static ? float{args.number} : scales[i]) * factor;
    }
  });
}

}  // namespace pykv::PYKV_ISA
