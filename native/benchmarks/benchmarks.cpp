#include "benchmarks.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <string_view>

#include "attention_pieces.h"
#include "quire/buffers.h"
#include "quire/cpu_features.h"
#include "quire/linear_pieces.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

template <typename Call>
std::vector<double> time_calls(int num_calls, Call call) {
    std::vector<double> seconds;
    for (int index = 0; index < num_calls; ++index) {
        const double start = now();
        call(index);
        seconds.push_back(now() - start);
    }
    return seconds;
}

// Keeps the compiler from removing the computation of a number.
template <typename T>
void keep(const T& value) {
    asm volatile("" : : "g"(&value) : "memory");
}

// ---- reading --------------------------------------------------------------------------------------------------------

using Reader = std::uint64_t (*)(const std::byte* data, std::size_t num_bytes);

constexpr std::size_t kLine = 64;
constexpr std::size_t kBytesPerPiece = std::size_t{1} << 20;

typedef std::uint64_t Words16 __attribute__((vector_size(16)));

std::uint64_t read_portable(const std::byte* data, std::size_t num_bytes) {
    Words16 sums[4] = {};
    for (std::size_t at = 0; at + kLine <= num_bytes; at += kLine) {
        Words16 line[4];
        std::memcpy(line, data + at, kLine);
        for (int i = 0; i < 4; ++i) sums[i] += line[i];
    }
    const Words16 sum = sums[0] + sums[1] + sums[2] + sums[3];
    return sum[0] + sum[1];
}

#if defined(__x86_64__)
// The hardware's own prefetch stops at the end of each page.
__attribute__((always_inline)) inline void prefetch_lines(const std::byte* data) {
    for (int i = 32; i < 36; ++i) _mm_prefetch(reinterpret_cast<const char*>(data + i * kLine), _MM_HINT_T0);
}

__attribute__((target("avx2"))) std::uint64_t read_avx2(const std::byte* data, std::size_t num_bytes) {
    __m256i sums[8] = {};
    for (std::size_t at = 0; at + 4 * kLine <= num_bytes; at += 4 * kLine) {
        prefetch_lines(data + at);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            const auto* half_line = reinterpret_cast<const __m256i*>(data + at + i * kLine / 2);
            sums[i] = _mm256_add_epi64(sums[i], _mm256_loadu_si256(half_line));
        }
    }
    for (int i = 1; i < 8; ++i) sums[0] = _mm256_add_epi64(sums[0], sums[i]);
    alignas(32) std::uint64_t words[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(words), sums[0]);
    return words[0] + words[1] + words[2] + words[3];
}

__attribute__((target("avx512f"))) std::uint64_t read_avx512(const std::byte* data, std::size_t num_bytes) {
    __m512i sums[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
    for (std::size_t at = 0; at + 4 * kLine <= num_bytes; at += 4 * kLine) {
        prefetch_lines(data + at);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sums[i] = _mm512_add_epi64(sums[i], _mm512_loadu_si512(data + at + i * kLine));
    }
    alignas(64) std::uint64_t words[8], total = 0;
    _mm512_store_si512(words, _mm512_add_epi64(_mm512_add_epi64(sums[0], sums[1]), _mm512_add_epi64(sums[2], sums[3])));
    for (const std::uint64_t word : words) total += word;
    return total;
}
#endif

Reader best_reader() {
#if defined(__x86_64__)
    if (cpu_features().avx512f) return read_avx512;
    if (cpu_features().avx2) return read_avx2;
#endif
    return read_portable;
}

// ---- arithmetic -----------------------------------------------------------------------------------------------------

// Does `num_rounds` rounds on registers and returns a number that depends on all of them.
using Arithmetic = float (*)(std::int64_t num_rounds, float start);

// Sums in registers at a time: enough to hide the latency of an addition.
constexpr int kSums = 12;

typedef float Floats4 __attribute__((vector_size(16)));

float compute_portable(std::int64_t num_rounds, float start) {
    Floats4 sums[kSums];
    const Floats4 factor = Floats4{} + start;
    for (Floats4& sum : sums) sum = factor;
    for (std::int64_t round = 0; round < num_rounds; ++round) {
#pragma GCC unroll 12
        for (int i = 0; i < kSums; ++i) sums[i] = sums[i] * factor + factor;
    }
    for (int i = 1; i < kSums; ++i) sums[0] += sums[i];
    return sums[0][0] + sums[0][3];
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) float compute_avx2(std::int64_t num_rounds, float start) {
    __m256 sums[kSums];
    const __m256 factor = _mm256_set1_ps(start);
    for (__m256& sum : sums) sum = factor;
    for (std::int64_t round = 0; round < num_rounds; ++round) {
#pragma GCC unroll 12
        for (int i = 0; i < kSums; ++i) sums[i] = _mm256_fmadd_ps(sums[i], factor, factor);
    }
    for (int i = 1; i < kSums; ++i) sums[0] = _mm256_add_ps(sums[0], sums[i]);
    return sums[0][0] + sums[0][7];
}

__attribute__((target("avx512f"))) float compute_avx512(std::int64_t num_rounds, float start) {
    __m512 sums[kSums];
    const __m512 factor = _mm512_set1_ps(start);
    for (__m512& sum : sums) sum = factor;
    for (std::int64_t round = 0; round < num_rounds; ++round) {
#pragma GCC unroll 12
        for (int i = 0; i < kSums; ++i) sums[i] = _mm512_fmadd_ps(sums[i], factor, factor);
    }
    for (int i = 1; i < kSums; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
    return sums[0][0] + sums[0][15];
}

__attribute__((target("avx512f,avx512bf16"))) float compute_avx512_bf16(std::int64_t num_rounds, float start) {
    __m512 sums[kSums];
    const __m512i pairs = _mm512_set1_epi32(0x3c003c00);  // small numbers in bfloat16
    for (__m512& sum : sums) sum = _mm512_set1_ps(start);
    for (std::int64_t round = 0; round < num_rounds; ++round) {
#pragma GCC unroll 12
        for (int i = 0; i < kSums; ++i) sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)pairs, (__m512bh)pairs);
    }
    for (int i = 1; i < kSums; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
    return sums[0][0] + sums[0][15];
}

// Tiles 0 … 5 are sums; 6 and 7 are multiplied, 16 rows x 32 inputs x 16 outputs.
__attribute__((target("amx-tile,amx-bf16"))) float compute_amx(std::int64_t num_rounds, float start) {
    struct alignas(64) {
        std::uint8_t palette = 1, unused[15] = {};
        std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } configuration;
    std::uint16_t pairs[16][32];
    std::fill_n(&pairs[0][0], 16 * 32, std::uint16_t{0x3c00});  // small numbers in bfloat16
    float sums[16][16];
    std::fill_n(&sums[0][0], 16 * 16, start);
    // The tile instructions do not tell the compiler what they read.
    asm volatile("" : : "g"(&configuration), "g"(&pairs), "g"(&sums) : "memory");
    _tile_loadconfig(&configuration);
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums, 64);
    _tile_loadd(2, sums, 64);
    _tile_loadd(3, sums, 64);
    _tile_loadd(4, sums, 64);
    _tile_loadd(5, sums, 64);
    _tile_loadd(6, pairs, 64);
    _tile_loadd(7, pairs, 64);
    for (std::int64_t round = 0; round < num_rounds; ++round) {
        for (int i = 0; i < kSums; i += 6) {
            _tile_dpbf16ps(0, 6, 7);
            _tile_dpbf16ps(1, 6, 7);
            _tile_dpbf16ps(2, 6, 7);
            _tile_dpbf16ps(3, 6, 7);
            _tile_dpbf16ps(4, 6, 7);
            _tile_dpbf16ps(5, 6, 7);
        }
    }
    _tile_stored(5, sums, 64);
    _tile_release();
    return sums[0][0] + sums[15][15];
}
#endif

// The arithmetic of a set, and the additions and multiplications of one sum in a round.
struct SetArithmetic {
    Arithmetic compute;
    int operations;
};

SetArithmetic arithmetic_of(std::string_view set_name) {
    if (set_name == "portable") return {compute_portable, 2 * 4};
#if defined(__x86_64__)
    const CpuFeatures& features = cpu_features();
    if (set_name.starts_with("avx2") && features.avx2 && features.fma) return {compute_avx2, 2 * 8};
    if (set_name == "avx512" && features.avx512f) return {compute_avx512, 2 * 16};
    if (set_name == "avx512_bf16" && features.avx512_bf16) return {compute_avx512_bf16, 2 * 32};
    if (set_name == "amx" && features.amx_bf16) return {compute_amx, 2 * 16 * 16 * 32};
#endif
    return {nullptr, 0};
}

// ---- products -------------------------------------------------------------------------------------------------------

void compute_product(const Kernels& kernels, ThreadTeam& team, const MatrixView& matrix, const LinearInput& input,
                     const Rows& output) {
    const int num_rows = input.rounded.num_rows;
    const LinearPieces pieces(matrix, num_rows, team.size());
    team.run([&kernels, matrix, input, output, num_rows, pieces](ThreadTeam::Member& member) {
        if (const RowForms forms = kernels.forms_for(matrix.type); forms.any()) {
            member.for_pieces(num_rows, [&](int row) { kernels.round_row(input, forms, matrix.num_inputs, row); });
        }
        member.for_pieces(pieces.count(),
                          [&](int piece) { kernels.linear(matrix, input, output, pieces.tile(piece), false); });
    });
}

}  // namespace

std::vector<double> time_reading(ThreadTeam& team, const std::byte* data, std::size_t num_bytes, int num_passes) {
    const Reader read = best_reader();
    const int num_pieces = static_cast<int>((num_bytes + kBytesPerPiece - 1) / kBytesPerPiece);
    return time_calls(num_passes, [&](int) {
        team.run([read, data, num_bytes, num_pieces](ThreadTeam::Member& member) {
            member.for_pieces(num_pieces, [&](int piece) {
                const std::size_t start = piece * kBytesPerPiece;
                keep(read(data + start, std::min(kBytesPerPiece, num_bytes - start)));
            });
        });
    });
}

double arithmetic_rate(const char* set_name, ThreadTeam& team, double seconds) {
    const SetArithmetic set = arithmetic_of(set_name);
    if (set.compute == nullptr) return 0.0;
    // Pieces are short, so that a member that loses its core does not delay the others for long.
    constexpr std::int64_t kRoundsPerPiece = 100'000;
    constexpr int kPiecesPerMember = 8;
    const int num_pieces = kPiecesPerMember * team.size();
    double best = 0.0;
    for (const double end = now() + seconds; now() < end || best == 0.0;) {
        const double start = now();
        team.run([set, num_pieces](ThreadTeam::Member& member) {
            member.for_pieces(num_pieces, [&](int) { keep(set.compute(kRoundsPerPiece, 0.5F)); });
        });
        const double num_operations = 1.0 * num_pieces * kRoundsPerPiece * kSums * set.operations;
        best = std::max(best, num_operations / (now() - start));
    }
    return best;
}

std::vector<double> time_products(const Kernels& kernels, ThreadTeam& team, const std::vector<MatrixView>& matrices,
                                  const Rows& input, const Rows& output, int num_rows, int num_calls) {
    Buffer<std::byte> rounded(RoundedRows::bytes(matrices.front().num_inputs, num_rows));
    const LinearInput rows = {input, {rounded.data(), num_rows}};
    std::vector<double> seconds = time_calls(
        num_calls, [&](int index) { compute_product(kernels, team, matrices[index % matrices.size()], rows, output); });
    team.quiesce();
    return seconds;
}

std::vector<double> time_attention(const Kernels& kernels, ThreadTeam& team, const std::vector<PagedKv>& layers,
                                   const AttendingSequences& sequences, int num_passes) {
    const int num_heads = sequences.num_heads, num_kv_heads = layers.front().num_kv_heads;
    const int head_dim = layers.front().head_dim, stride = round_up(num_heads * head_dim, kPanelWidth);
    const int num_tokens = sequences.num_sequences * sequences.num_queries;
    const std::size_t count = static_cast<std::size_t>(num_tokens) * stride;
    Buffer<float> query(count), output(count), scratch(team.size() * attention_scratch(head_dim));
    for (std::size_t i = 0; i < count; ++i) query.data()[i] = static_cast<float>(i % 7) - 3.0F;
    const Rows from{query.data(), stride}, to{output.data(), stride};
    // Cut into pieces as in a step.
    std::vector<std::int64_t> starts, positions;
    for (int i = 0; i <= sequences.num_sequences; ++i) starts.push_back(i * sequences.num_queries);
    for (int i = 0; i < sequences.num_sequences; ++i) {
        for (int back = sequences.num_queries; back > 0; --back) positions.push_back(sequences.lengths[i] - back);
    }
    StepView step;
    step.num_sequences = sequences.num_sequences;
    step.num_tokens = num_tokens;
    step.query_starts = starts.data();
    step.positions = positions.data();
    step.tables = {sequences.block_tables};
    step.table_strides = {sequences.table_stride};
    DecoderShape shape;
    shape.num_heads = num_heads;
    shape.num_kv_heads = num_kv_heads;
    AttentionPieces pieces;
    // Sequences of a layer with a window never go together.
    pieces.plan(step, shape, {.window = 1}, layers.front().block_size, team.size());
    std::vector<double> seconds = time_calls(num_passes, [&](int) {
        team.run([&kernels, &layers, &step, &pieces, from, to, scratch = scratch.data(),
                  group = num_heads / num_kv_heads, head_dim](ThreadTeam::Member& member) {
            float* own_scratch = scratch + member.index() * attention_scratch(head_dim);
            for (const PagedKv& kv : layers) {
                member.for_pieces(pieces.count(), [&](int piece) {
                    AttentionTask task = pieces.task_of(piece, step, 0, nullptr);
                    task.kv = kv;
                    task.query = from;
                    task.output = to;
                    task.group = group;
                    task.scale = 1.0F / std::sqrt(static_cast<float>(head_dim));
                    kernels.attention(task, own_scratch);
                });
            }
        });
    });
    team.quiesce();
    return seconds;
}

}  // namespace quire
