// pack: flat arrays -> matrix (cast, sum, divide, pad). unpack: matrix -> flat arrays (cast, add).
//
// A matrix has rows x columns elements; each segment owns some columns of it. Element j of a
// segment's flat array is row j / width, column j % width of those columns; the rest is padding.
// A thread block works on one tile of one segment: part of a long row, or several short rows.
//
//     a segment of width 11, columns 12, two rows, numel 21
//         row 0   [ 0  1  2  3][ 4  5  6  7][ 8  9 10  .]      . is padding: zero after pack
//         row 1   [11 12 13 14][15 16 17 18][19 20  .  .]      [ ] is one 16-byte word
//
// Where a row of the array and of the matrix are both aligned, a thread moves whole words (16 bytes
// of the wider dtype); elsewhere, and at the ends, neighbouring threads move neighbouring elements.
//
// Compiled behind arithmetic.cu, as one source. No header is included: any NVRTC will do.

#define EACH(i, n) _Pragma("unroll") for (int i = 0; i < n; ++i)
#define ROLLED _Pragma("unroll 1")  // unrolled, these loops are code that is not faster

constexpr int THREADS = 256;
constexpr int BLOCKS = 4;     // at once on a multiprocessor: leaves a thread 64 registers
constexpr int ENTRIES = 496;  // all arguments together must stay under 4 KiB

struct Segment {
    int64 numel, width, column, columns;
    int64 first_tile;  // of all tiles of the matrix
    int64 chunks;      // tiles side by side in a row, at least 1
    int64 chunk;       // columns of a tile
    int64 rows;        // of a tile
    int64 lanes;       // threads that share a row: a power of two, at most THREADS
};

struct Arguments {
    const Segment* segments;
    const uint32* tile_segment;  // which segment each tile belongs to
    void* matrix;
    int64 rows, columns;
    float64 divisor;       // or its reciprocal, where that is exact
    uint32 first_tile;     // of this launch
    uint32 first_segment;  // of this launch: entries[0] is its
    uint32 tail;  // entries from here on are the lists that segments with several arrays point to
    uint32 mode;  // the flags below
    // One per segment: 0 (no array), a pointer, or LIST | count << 32 | first (in the tail).
    // By value: the launch takes a snapshot, and a CUDA graph keeps it.
    uint64 entries[ENTRIES];
};
static_assert(sizeof(Arguments) <= 4096, "kernel arguments are limited to 4 KiB");

enum : uint32 { DIVIDE = 1, SCALE = 2, NAN_FILL = 4, ACCUMULATE = 8 };
enum : uint64 { LIST = 1ull << 63 };

template <int BYTES> struct Word;
template <> struct Word<16> { using type = uint4; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<4> { using type = uint32; };
template <> struct Word<2> { using type = uint16; };
template <> struct Word<1> { using type = uint8; };

template <class T, int V> union Lanes {
    typename Word<sizeof(T) * V>::type word;
    T x[V];

    __device__ void load(const T* p) { word = *reinterpret_cast<const decltype(word)*>(p); }
    __device__ void store(T* p) const { *reinterpret_cast<decltype(word)*>(p) = word; }
};

template <class T, int V> __device__ bool aligned(const T* p) {
    return reinterpret_cast<uint64>(p) % (sizeof(T) * V) == 0;
}

// Elements that make 16 bytes of the wider dtype.
template <class S, class T>
constexpr int widest = 16 / (sizeof(S) > sizeof(T) ? sizeof(S) : sizeof(T));

// Words that a thread loads before it stores any: hides the latency of memory. More (4 at V = 8)
// spills registers and moves a fifth less.
template <int V> constexpr int unroll = V > 1 ? 2 : 4;

// A tile, and this thread's place in it. The segment is read again for each row (from the cache):
// kept in registers, it would leave fewer threads room.
struct Tile {
    const Segment& segment;
    int64 row, row_end, column;
    int columns, lane, lanes;

    __device__ Tile(const Arguments& a, uint32 tile, uint32 index) : segment(a.segments[index]) {
        const uint32 at = tile - static_cast<uint32>(segment.first_tile);
        const uint32 chunks = static_cast<uint32>(segment.chunks);
        const int64 top = at / chunks * segment.rows;
        lanes = static_cast<int>(segment.lanes);
        lane = threadIdx.x % lanes;
        row = top + threadIdx.x / lanes;
        row_end = top + segment.rows < a.rows ? top + segment.rows : a.rows;
        column = at % chunks * segment.chunk;
        const int64 rest = segment.columns - column;
        columns = static_cast<int>(rest < segment.chunk ? rest : segment.chunk);
    }

    __device__ void next_row() { row += THREADS / lanes; }

    // How many of the tile's columns hold elements of the array in this row; the rest is padding.
    __device__ int filled() const {
        const int64 in_row = segment.width - column;
        const int64 in_array = segment.numel - flat();
        const int64 filled = in_row < in_array ? in_row : in_array;
        return filled < 0 ? 0 : filled < columns ? static_cast<int>(filled) : columns;
    }

    __device__ int64 flat() const { return row * segment.width + column; }
    __device__ int64 cell(const Arguments& a) const {
        return row * a.columns + segment.column + column;
    }
};

// ---- pack -------------------------------------------------------------------------------------

// The arrays of one segment: entries[first .. first + count).
struct Sources {
    uint32 first, count;

    template <class S> __device__ const S* at(const Arguments& a, uint32 k, int64 flat) const {
        return reinterpret_cast<const S*>(a.entries[first + k]) + flat;
    }
};

// Pack `length` elements, a multiple of V, of the flat arrays from `flat` on.
template <class S, class T, int V>
__device__ void pack_run(
    const Arguments& a, Sources sources, int64 flat, T* out, int length, const Tile& tile) {
    using A = typename Sum<S, T>::type;
    constexpr int U = unroll<V>;
    const int stride = tile.lanes * V;
    ROLLED for (int begin = tile.lane * V; begin < length; begin += U * stride) {
        Lanes<S, V> in[U];
        const S* const source = sources.at<S>(a, 0, flat + begin);
        EACH(u, U) if (begin + u * stride < length) in[u].load(source + u * stride);
        if constexpr (same<S, T>) {
            if (sources.count == 1 && !(a.mode & (DIVIDE | SCALE))) {
                // The bits as they are: NaN payloads, -0.0.
                EACH(u, U) if (begin + u * stride < length) in[u].store(out + begin + u * stride);
                continue;
            }
        }
        A sum[U][V];
        EACH(u, U) EACH(i, V) convert(in[u].x[i], sum[u][i]);
        ROLLED for (uint32 k = 1; k < sources.count; ++k) {
            const S* const other = sources.at<S>(a, k, flat + begin);
            EACH(u, U) if (begin + u * stride < length) in[u].load(other + u * stride);
            EACH(u, U) EACH(i, V) {
                A term;
                convert(in[u].x[i], term);
                sum[u][i] = plus(sum[u][i], term);
            }
        }
        A divisor = {};
        if constexpr (!is_integer<A>) convert(a.divisor, divisor);
        EACH(u, U) {
            Lanes<T, V> result;
            EACH(i, V) {
                A value = sum[u][i];
                if constexpr (!is_integer<A>) {
                    if (a.mode & DIVIDE) value = over(value, divisor);
                    if (a.mode & SCALE) value = times(value, divisor);
                }
                convert(value, result.x[i]);
            }
            if (begin + u * stride < length) result.store(out + begin + u * stride);
        }
    }
}

template <class S, class T>
__global__ void __launch_bounds__(THREADS, BLOCKS) pack(const __grid_constant__ Arguments a) {
    constexpr int V = widest<S, T>;
    const uint32 number = a.first_tile + blockIdx.x;
    const uint32 index = a.tile_segment[number];
    const uint64 entry = a.entries[index - a.first_segment];
    Sources sources = {index - a.first_segment, entry ? 1u : 0u};
    if (entry & LIST) {
        sources.first = a.tail + static_cast<uint32>(entry);
        sources.count = static_cast<uint32>((entry ^ LIST) >> 32);
    }
    T missing = {};
    if constexpr (!is_integer<T>)
        if (a.mode & NAN_FILL) convert(__uint_as_float(0x7fc00000), missing);
    ROLLED for (Tile tile(a, number, index); tile.row < tile.row_end; tile.next_row()) {
        const int64 flat = tile.flat();
        const int filled = tile.filled();
        T* const out = static_cast<T*>(a.matrix) + tile.cell(a);
        if (sources.count == 0) {
            ROLLED for (int i = tile.lane; i < filled; i += tile.lanes) out[i] = missing;
        } else {
            bool words = aligned<T, V>(out);
            ROLLED for (uint32 k = 0; k < sources.count; ++k)
                words &= aligned<S, V>(sources.at<S>(a, k, flat));
            const int whole = words ? filled / V * V : 0;
            pack_run<S, T, V>(a, sources, flat, out, whole, tile);
            pack_run<S, T, 1>(a, sources, flat + whole, out + whole, filled - whole, tile);
        }
        ROLLED for (int i = filled + tile.lane; i < tile.columns; i += tile.lanes) out[i] = T{};
    }
}

// ---- unpack -----------------------------------------------------------------------------------

// Unpack `length` elements, a multiple of V.
template <class S, class T, int V>
__device__ void unpack_run(const Arguments& a, const S* in, T* out, int length, const Tile& tile) {
    using A = typename Sum<S, T>::type;
    constexpr int U = unroll<V>;
    const int stride = tile.lanes * V;
    ROLLED for (int begin = tile.lane * V; begin < length; begin += U * stride) {
        Lanes<S, V> received[U];
        Lanes<T, V> result[U];
        EACH(u, U) {
            if (begin + u * stride >= length) continue;
            received[u].load(in + begin + u * stride);
            if (a.mode & ACCUMULATE) result[u].load(out + begin + u * stride);
        }
        EACH(u, U) {
            if (a.mode & ACCUMULATE) {
                EACH(i, V) {
                    A present, term;
                    convert(result[u].x[i], present);
                    convert(received[u].x[i], term);
                    convert(plus(present, term), result[u].x[i]);
                }
            } else if constexpr (same<S, T>) {
                result[u].word = received[u].word;  // the bits as they are
            } else {
                EACH(i, V) {
                    A value;
                    convert(received[u].x[i], value);
                    convert(value, result[u].x[i]);
                }
            }
            if (begin + u * stride < length) result[u].store(out + begin + u * stride);
        }
    }
}

template <class S, class T>
__global__ void __launch_bounds__(THREADS, BLOCKS) unpack(const __grid_constant__ Arguments a) {
    constexpr int V = widest<S, T>;
    const uint32 number = a.first_tile + blockIdx.x;
    const uint32 index = a.tile_segment[number];
    // May be null, where there is no element.
    T* const target = reinterpret_cast<T*>(a.entries[index - a.first_segment]);
    ROLLED for (Tile tile(a, number, index); tile.row < tile.row_end; tile.next_row()) {
        const int filled = tile.filled();
        const S* const in = static_cast<const S*>(a.matrix) + tile.cell(a);
        T* const out = target + tile.flat();
        const int whole = aligned<S, V>(in) && aligned<T, V>(out) ? filled / V * V : 0;
        unpack_run<S, T, V>(a, in, out, whole, tile);
        unpack_run<S, T, 1>(a, in + whole, out + whole, filled - whole, tile);
    }
}
