// Products of rows with coded matrices (see coded.h).
//
// Rows are rounded to int8 too, 32 inputs at a time. The products of the inputs that share a scale are added as
// integers, exactly; then they become floats, in order:
//
//     sum = fma(integers, scale of the codes * scale of the row, sum)
//     sum = fma(scale of the row * its sum of integers, minimum, sum)      after each chunk, if there are minimums
//
// So all instruction sets with fma compute the same bits.
#include <type_traits>

#include "block_product.h"
#include "coded.h"
#include "kernels_of_set.h"
#include "round_rows.h"

namespace quire::QUIRE_ISA {
namespace {

// The memory to prefetch while a tile is computed: `pace` is in 1/256 bytes, for each step and panel (0: nothing), and
// so is the current place. Spread like this, prefetches rarely fill the processor's queue: a full queue drops new ones.
struct CodedFetch {
    const char* from;
    std::size_t reached, pace;
};

// The coding of a matrix, as compile-time constants; the numbers of a table are not.
template <int kBits_, int kGroup_, ScaleType kScales_, bool kLooksUp_ = false>
struct Form {
    static constexpr int kBits = kBits_, kGroup = kGroup_;
    static constexpr ScaleType kScales = kScales_;
    static constexpr bool kNested = Coding{.scales = kScales}.nested();
    static constexpr bool kLooksUp = kLooksUp_;
    // The numbers of most tables need as much room in products as codes of 8 bits.
    using Step = CodeStep<kLooksUp && kScales != ScaleType::kNestedE4m3 ? 8 : kBits>;
};

// Calls work(form of the coding). Groups of 16 are nested, and codes of 2, 3 and 6 bits have such groups; codes of 8
// bits are not nested.
template <typename Work>
void with_form(const Coding& coding, Work work) {
    constexpr auto kFlat = ScaleType::kFloat16, kNested = ScaleType::kNested;
    const bool looks_up = coding.table != CodeTable::kNone, nested = coding.nested();
    switch (coding.bits) {
        case 2:
            return work(Form<2, kUnit, kNested>());
        case 3:
            return looks_up ? work(Form<3, kUnit, kNested, true>()) : work(Form<3, kUnit, kNested>());
        case 4:
            if (coding.scales == ScaleType::kNestedE4m3) return work(Form<4, kUnit, ScaleType::kNestedE4m3, true>());
            if (coding.scales == ScaleType::kPower) return work(Form<4, kRowGroup, ScaleType::kPower, true>());
            if (looks_up) {
                return nested ? work(Form<4, kRowGroup, kNested, true>()) : work(Form<4, kRowGroup, kFlat, true>());
            }
            return nested ? work(Form<4, kRowGroup, kNested>()) : work(Form<4, kRowGroup, kFlat>());
        case 5:
            return nested ? work(Form<5, kRowGroup, kNested>()) : work(Form<5, kRowGroup, kFlat>());
        case 6:
            return work(Form<6, kUnit, kNested>());
        default:
            return work(Form<8, kRowGroup, kFlat>());
    }
}

// Scales of a chunk from a panel on, or its minimums.
struct ChunkScales {
    const std::byte *first, *outer;
    std::size_t unit, group;  // bytes from one to the next
    float factor;             // of all, if they are nested

    ChunkScales(const CodedLayout& layout, const std::byte* chunk, int place, bool minimums)
        : unit(layout.unit_bytes()), group(layout.group_bytes()), factor(table_of(layout.coding).factor) {
        const std::size_t before = layout.code_bytes() + (minimums ? layout.scale_bytes() : 0);
        first = chunk + layout.head_bytes() + before + place * kPanelWidth * layout.coding.scale_bytes();
        outer = chunk + (minimums ? layout.outer_bytes() : 0) + layout.factor_bytes() * place * kPanelWidth;
    }
};

inline Floats load_half(const std::byte* from) { return load_float16(reinterpret_cast<const std::uint16_t*>(from)); }

// The scales of kPanels panels, widened as they are needed.
template <typename AnyForm, int kPanels>
class TileScales {
  public:
    explicit TileScales(const ChunkScales& scales) : scales_(scales) {
        if constexpr (AnyForm::kNested) {
            QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) {
                if constexpr (AnyForm::kScales == ScaleType::kNestedE4m3) {
                    const auto* factors = reinterpret_cast<const float*>(scales.outer) + p * kPanelWidth;
                    outer_[p] = load(factors) * broadcast(256.0F);  // see load_e4m3
                } else {
                    outer_[p] = load_half(scales.outer + 2 * p * kPanelWidth) * broadcast(scales.factor);
                }
            }
        }
    }
    Floats at(int unit, int group, int panel) const {
        const std::byte* from = scales_.first + unit * scales_.unit + group * scales_.group;
        const auto* bytes = reinterpret_cast<const std::int8_t*>(from + panel * kPanelWidth);
        switch (AnyForm::kScales) {
            case ScaleType::kFloat16:
                return load_half(from + 2 * panel * kPanelWidth);
            case ScaleType::kNested:
                return outer_[panel] * load(bytes);
            case ScaleType::kNestedE4m3:
                return outer_[panel] * load_e4m3(bytes);
            default:
                return load_powers(bytes);
        }
    }

  private:
    const ChunkScales scales_;
    Floats outer_[kPanels];
};

// A tile has its sums twice: as integers of a group, in registers, and as floats. kTotalsStay: the floats are in
// registers, too. kCodedRows: the most rows of a tile. Blocks of up to kMostFewRows rows wait for memory rather than
// for arithmetic (half as many if codes take long to widen): their tiles have at most kFewRows rows, but more panels,
// so that memory is read line after line.
#if defined(__AVX512F__)
constexpr bool kTotalsStay = true;
constexpr bool kUnrollsLines = true;
constexpr int kCodedRows = 6, kFewRows = 3, kMostFewRows = 8;
// The most panels of a tile. With three, the last panel of a group would be alone.
constexpr int coded_panels(int num_rows) {
    const int most = least(kGroupPanels, 12 / num_rows);
    return most == 3 ? 2 : most;
}
#else
constexpr bool kTotalsStay = false;
#if defined(__AVX2__)
constexpr bool kUnrollsLines = true;
constexpr int kCodedRows = 6, kFewRows = 1, kMostFewRows = 1;
#else
constexpr bool kUnrollsLines = false;  // gcc 12 takes twice as long, and the kernels are not faster
constexpr int kCodedRows = 3, kFewRows = 1, kMostFewRows = 1;  // gcc 12 takes more than twice as long for six
#endif
constexpr int coded_panels(int num_rows) { return num_rows == 1 ? 2 : 1; }
#endif

// How far ahead of a single row its own chunk is fetched: farther ahead, memory is read more slowly.
constexpr std::size_t kAheadBytes = 1024;

// The lines of codes from a panel on; in bytes from one to the next.
struct CodeLines {
    const std::byte* first;
    std::size_t line, unit;
};

// Some rows and panels of a chunk.
struct CodedTile {
    RoundedChunk rows;
    CodeLines codes;
    ChunkScales scales, minimums;
    CodeTable table;
    int num_units, middle;
    bool has_minimums;
    Floats (*sums)[kGroupPanels];
    CodedFetch fetch;
};

// The float sums of a tile in registers.
template <int kRows, int kPanels>
struct TileSums {
    const CodedTile& tile;
    Floats of[kRows][kPanels];

    explicit TileSums(const CodedTile& tile) : tile(tile) {
        QUIRE_UNROLLED for (int r = 0; r < kRows; ++r) {
            QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) of[r][p] = tile.sums[r][p];
        }
    }
    void store() const {
        QUIRE_UNROLLED for (int r = 0; r < kRows; ++r) {
            QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) tile.sums[r][p] = of[r][p];
        }
    }
};

// The same, left in memory.
struct StoredSums {
    Floats (*of)[kGroupPanels];

    explicit StoredSums(const CodedTile& tile) : of(tile.sums) {}
    void store() const {}
};

// Adds the minimums of a chunk, times the totals of the rows' groups.
template <typename AnyForm, int kRows, int kPanels>
inline void add_minimums(const CodedTile& tile) {
    constexpr int kGroups = kUnitInputs / AnyForm::kGroup, kOfRow = kChunkInputs / AnyForm::kGroup;
    const TileScales<AnyForm, kPanels> minimums(tile.minimums);
    const float* totals = AnyForm::kGroup == kUnit ? tile.rows.unit_totals : tile.rows.totals;
    TileSums<kRows, kPanels> sums(tile);
    for (int u = 0; u < tile.num_units; ++u) {
        for (int g = 0; g < kGroups; ++g, ++totals) {
            Floats own[kPanels];
            QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) own[p] = minimums.at(u, g, p);
            QUIRE_UNROLLED for (int r = 0; r < kRows; ++r) {
                const Floats total = broadcast(totals[r * kOfRow]);
                QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) sums.of[r][p] = fma(total, own[p], sums.of[r][p]);
            }
        }
    }
    sums.store();
}

template <typename AnyForm, int kRows, int kPanels>
void multiply_codes(const CodedTile& tile) {
    constexpr int kBits = AnyForm::kBits, kGroup = AnyForm::kGroup;
    using Each = typename AnyForm::Step;
    constexpr int kGroups = kUnitInputs / kGroup, kSums = kGroup / kUnit;
    constexpr int kSteps = line_steps(kBits), kAtOnce = steps_at_once(kBits), kLines = kGroup / kStepInputs / kSteps;
    const std::byte* codes = tile.codes.first;
    const std::size_t line_bytes = tile.codes.line;
    const std::int8_t* rows = tile.rows.numbers;
    [[maybe_unused]] const std::int8_t* table = kStepTables<Each::kSigned>.of[static_cast<int>(tile.table)];
    std::size_t reached = tile.fetch.reached, fetched = reached >> 8;
    const TileScales<AnyForm, kPanels> all_scales(tile.scales);
    std::conditional_t<kTotalsStay, TileSums<kRows, kPanels>, StoredSums> totals(tile);
    for (int u = 0; u < tile.num_units; ++u, codes += tile.codes.unit, rows += kUnitInputs) {
        const std::byte *at = codes, *high = codes + low_lines(kBits) * line_bytes;
        QUIRE_UNROLLED for (int g = 0; g < kGroups; ++g) {
            const auto correction_of = [&](int row) {
                if constexpr (Each::kSigned) return 0;
                const std::int32_t* of_row = tile.rows.sums + row * RoundedChunk::kSums + u * 2 + g;
                return -tile.middle * (kSums == 1 ? *of_row : of_row[0] + of_row[1]);
            };
            Ints sums[kRows][kPanels];
            QUIRE_UNROLLED for (int r = 0; r < kRows; ++r) {
                const Ints first = Each::first(correction_of(r));
                QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) sums[r][p] = first;
            }
            const auto add_line = [&](int line) {
                QUIRE_UNROLLED for (int first = 0; first < kSteps; first += kAtOnce) {
                    typename Each::Vector weights[kAtOnce][kPanels];
                    QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) {
                        const std::byte* panel = at + p * kStepBytes;
                        Ints steps[kAtOnce];
                        steps_of<kBits>(panel, high + p * kStepBytes, line_bytes, line, first, steps);
                        QUIRE_UNROLLED for (int s = 0; s < kAtOnce; ++s) {
                            if constexpr (AnyForm::kLooksUp) {
                                steps[s] = looked_up(steps[s], table);
                            } else if constexpr (Each::kSigned && kBits < 8) {
                                steps[s] = less(steps[s], tile.middle);
                            }
                            weights[s][p] = Each::codes(steps[s]);
                        }
                    }
                    reached += kPanels * kAtOnce * tile.fetch.pace;
                    for (; fetched < reached >> 8; fetched += kLineBytes) {
                        prefetch(tile.fetch.from + fetched);
                    }
                    QUIRE_UNROLLED for (int s = 0; s < kAtOnce; ++s) {
                        const std::int8_t* of_step = rows + (line * kSteps + first + s) * kStepInputs;
                        QUIRE_UNROLLED for (int r = 0; r < kRows; ++r) {
                            QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) {
                                sums[r][p] = Each::add(sums[r][p], weights[s][p], of_step + r * kChunkInputs);
                            }
                        }
                    }
                }
                at += line_bytes;
            };
            if constexpr (kRows <= kFewRows || !kUnrollsLines) {
                QUIRE_ROLLED for (int line = 0; line < kLines; ++line) add_line(g * kLines + line);
            } else {
                QUIRE_UNROLLED for (int line = 0; line < kLines; ++line) add_line(g * kLines + line);
            }
            Floats scales[kPanels];
            QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) scales[p] = all_scales.at(u, g, p);
            QUIRE_UNROLLED for (int r = 0; r < kRows; ++r) {
                const Floats row_scale = broadcast(tile.rows.scales[r * RoundedChunk::kScales + u]);
                QUIRE_UNROLLED for (int p = 0; p < kPanels; ++p) {
                    const Floats sum = to_floats(Each::total(sums[r][p], correction_of(r)));
                    totals.of[r][p] = fma(sum, scales[p] * row_scale, totals.of[r][p]);
                }
            }
        }
    }
    totals.store();
    if (tile.has_minimums) add_minimums<AnyForm, kRows, kPanels>(tile);
}

// A chunk of some panels, as it is in memory.
struct SpanChunk {
    const CodedPanels& panels;
    int input, num_inputs;
    const char* next;  // the chunk to prefetch

    const std::byte* stored() const { return panels.at(input); }
    std::size_t bytes() const { return panels.layout.chunk_bytes(num_inputs); }
    CodeLines codes(int first_panel) const {
        const CodedLayout& layout = panels.layout;
        return {stored() + layout.head_bytes() + first_panel * kStepBytes, layout.line_bytes(), layout.unit_bytes()};
    }
    ChunkScales scales(int first_panel) const { return {panels.layout, stored(), first_panel, false}; }
    ChunkScales minimums(int first_panel) const { return {panels.layout, stored(), first_panel, true}; }
};

// Multiplies a tile of at most kRows rows and kPanels panels.
template <typename AnyForm, int kRows = kCodedRows, int kPanels = kGroupPanels>
void multiply_coded_tile(const CodedTile& tile, int num_rows, int num_panels) {
    if (num_rows < kRows) {
        if constexpr (kRows > 1) multiply_coded_tile<AnyForm, kRows - 1, kPanels>(tile, num_rows, num_panels);
    } else if (num_panels < kPanels) {
        if constexpr (kPanels > 1) multiply_coded_tile<AnyForm, kRows, kPanels / 2>(tile, num_rows, num_panels);
    } else if constexpr (kPanels <= coded_panels(kRows)) {
        multiply_codes<AnyForm, kRows, kPanels>(tile);
    }
}

class CodedBlock {
  public:
    CodedBlock(const LinearInput& input, const LinearTile& block, BlockSums& sums)
        : rounded_(input.rounded), first_row_(block.first_row), num_rows_(block.num_rows), sums_(sums) {}

    void add_chunk(const SpanChunk& chunk) {
        const int count = chunk.panels.count;
        const Coding& coding = chunk.panels.layout.coding;
        // Codes of 4 and 8 bits take few instructions from one line to the next, unless groups are small.
        const bool is_quick = (coding.bits == 4 || coding.bits == 8) && coding.group == kRowGroup;
        const int few = is_quick ? kMostFewRows : kMostFewRows / 2;
        const int num_tiles = pieces_of(num_rows_, num_rows_ <= few ? kFewRows : kCodedRows);
        const std::size_t steps = chunk.num_inputs / kStepInputs;
        CodedFetch fetch = {chunk.next, 0, (chunk.bytes() << 8) / (num_tiles * count * steps)};
        // All tiles together fetch the next chunk. One tile reads all of a chunk in order: then the processor's own
        // prefetchers are faster where lines follow each other quickly. They fall behind a single row, which needs a
        // line every few cycles.
        const bool follows = is_quick || (coding.bits == 4 && num_rows_ == 1);
        if (num_tiles == 1 && coded_panels(num_rows_) >= count && follows) {
            fetch.from = reinterpret_cast<const char*>(chunk.stored()) + kAheadBytes;
            if (num_rows_ > 1) fetch.pace = 0;
        }
        for (int t = 0; t < num_tiles; ++t) {
            const int row = num_rows_ * t / num_tiles, num_rows = num_rows_ * (t + 1) / num_tiles - row;
            for (int p = 0, num_panels; p < count; p += num_panels) {
                num_panels = coded_panels(num_rows);
                while (num_panels > count - p) num_panels /= 2;
                add_tile(chunk, {row, num_rows, p, num_panels},
                         reinterpret_cast<Floats(*)[kGroupPanels]>(&sums_[row][chunk.panels.place + p]), fetch);
                fetch.reached += fetch.pace * steps * num_panels;
            }
        }
    }

  private:
    void add_tile(const SpanChunk& chunk, const LinearTile& place, Floats (*sums)[kGroupPanels],
                  const CodedFetch& fetch) const {
        const Coding& coding = chunk.panels.layout.coding;
        const int first = chunk.panels.place + place.first_panel;
        const CodedTile tile = {.rows = RoundedChunk(rounded_, chunk.input, first_row_ + place.first_row),
                                .codes = chunk.codes(first),
                                .scales = chunk.scales(first),
                                .minimums = chunk.minimums(first),
                                .table = coding.table,
                                .num_units = chunk.num_inputs / kUnitInputs,
                                .middle = coding.bits == 8 ? kFlip : middle_of(coding),
                                .has_minimums = coding.minimums,
                                .sums = sums,
                                .fetch = fetch};
        with_form(coding,
                  [&](auto form) { multiply_coded_tile<decltype(form)>(tile, place.num_rows, place.num_panels); });
    }

    const RoundedRows rounded_;
    const int first_row_, num_rows_;
    BlockSums& sums_;
};

}  // namespace

void add_coded_products(const MatrixView& matrix, const LinearInput& input, const LinearTile& block, const char* next,
                        float* sums) {
    const CodedPanels panels = coded_panels_from(matrix, block.first_panel, block.num_panels);
    CodedBlock product(input, block, *reinterpret_cast<BlockSums*>(sums));
    for (int from = 0; from < matrix.num_inputs; from += kChunkInputs) {
        const int left = matrix.num_inputs - from;
        const bool is_last = left <= kChunkInputs;
        product.add_chunk({.panels = panels,
                           .input = from,
                           .num_inputs = round_up(least(kChunkInputs, left), kCodedGroup),
                           .next = is_last ? next : reinterpret_cast<const char*>(panels.at(from + kChunkInputs))});
    }
}

}  // namespace quire::QUIRE_ISA
