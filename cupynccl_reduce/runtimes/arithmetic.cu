// The dtypes, and sums, divisions and casts of them. 16-bit floats are their bits.
//
// CuPy compiles with -ftz=true, which makes subnormal floats zero. PTX instructions written out
// are out of that flag's reach (and of -fmad's and -prec-div's), so everything fp32 is one.

using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;
using float32 = float;
using float64 = double;
struct float16 { uint16 bits; };
struct bfloat16 { uint16 bits; };

__device__ float32 plus(float32 a, float32 b) {
    float32 sum;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
}
__device__ float32 times(float32 a, float32 b) {
    float32 product;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
    return product;
}
__device__ float32 over(float32 a, float32 b) {
    float32 quotient;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
    return quotient;
}
template <class T> __device__ T plus(T a, T b) { return static_cast<T>(a + b); }
template <class T> __device__ T times(T a, T b) { return static_cast<T>(a * b); }
template <class T> __device__ T over(T a, T b) { return static_cast<T>(a / b); }

template <class T> __device__ void convert(T x, T& y) { y = x; }
__device__ void convert(float16 x, float32& y) {
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
}
__device__ void convert(float16 x, float64& y) {
    asm("cvt.f64.f16 %0, %1;" : "=d"(y) : "h"(x.bits));
}
__device__ void convert(float32 x, float64& y) {
    asm("cvt.f64.f32 %0, %1;" : "=d"(y) : "f"(x));
}
__device__ void convert(bfloat16 x, float32& y) {
    y = __uint_as_float(static_cast<uint32>(x.bits) << 16);
}
__device__ void convert(bfloat16 x, float64& y) {
    convert(__uint_as_float(static_cast<uint32>(x.bits) << 16), y);
}
__device__ void convert(float64 x, float32& y) {
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(y) : "d"(x));
}
__device__ void convert(float32 x, float16& y) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
}
__device__ void convert(float64 x, float16& y) {
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(y.bits) : "d"(x));
}
__device__ void convert(float32 x, bfloat16& y) {
    const uint32 bits = __float_as_uint(x);
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;  // rounding up could make it an infinity
    const uint32 rounded = bits + 0x7fff + ((bits >> 16) & 1);
    y.bits = static_cast<uint16>((nan ? bits | 0x400000 : rounded) >> 16);
}
__device__ void convert(float64 x, bfloat16& y) {
    // Through fp32 rounded to odd: rounded to nearest twice, a value just above a tie would be
    // taken for the tie.
    float32 chopped;
    float64 back;
    asm("cvt.rz.f32.f64 %0, %1;" : "=f"(chopped) : "d"(x));
    convert(chopped, back);
    convert(__uint_as_float(__float_as_uint(chopped) | (back != x)), y);
}

// What sums and divisions are made in: fp64 where one side is, else fp32; integers wrap around.
template <class S, class T> struct Sum { using type = float32; };
template <class S> struct Sum<S, float64> { using type = float64; };
template <class T> struct Sum<float64, T> { using type = float64; };
template <> struct Sum<float64, float64> { using type = float64; };
template <> struct Sum<uint8, uint8> { using type = uint8; };
template <> struct Sum<uint32, uint32> { using type = uint32; };
template <> struct Sum<uint64, uint64> { using type = uint64; };

template <class S, class T> constexpr bool same = false;
template <class T> constexpr bool same<T, T> = true;
template <class T> constexpr bool is_integer = same<T, uint8> || same<T, uint32> || same<T, uint64>;
