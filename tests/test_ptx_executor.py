"""The executor on a few lines of PTX: what instructions compute, how threads part and meet, and what it reports."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.ptx import numerics
from tests.ptx.errors import BarrierError, MemoryFault, PtxError, RaceError, UninitializedRead, UnknownInstructionError
from tests.ptx.snippet import run_snippet

U32, F32 = np.uint32, np.float32
LANES = np.arange(32)
MASK = (1 << 32) - 1


def words(seed: int, count: int = 32) -> np.ndarray:
    """Random words, the extreme ones among them."""
    values = np.random.default_rng(seed).integers(0, 1 << 32, count).astype(U32)
    values[:6] = [0, 1, MASK, 1 << 31, (1 << 31) - 1, 1 << 16]
    return np.random.default_rng(seed + 1).permutation(values)


def signed(x: int, bits: int = 32) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


LOAD_TWO = """
    add.s64 %rd1, %rd10, %rd0;
    ld.global.b32 %r1, [%rd1];
    add.s64 %rd2, %rd11, %rd0;
    ld.global.b32 %r2, [%rd2];
    add.s64 %rd3, %rd12, %rd0;
"""


# ---- instructions -----------------------------------------------------------------------------------

@pytest.mark.parametrize(("instruction", "want"), [
    ("add.s32", lambda a, b: a + b), ("sub.s32", lambda a, b: a - b), ("mul.lo.s32", lambda a, b: a * b),
    ("mul.hi.u32", lambda a, b: a * b >> 32), ("mul.hi.s32", lambda a, b: signed(a) * signed(b) >> 32),
    ("min.s32", lambda a, b: min(signed(a), signed(b))), ("min.u32", min), ("max.u32", max),
    ("max.s32", lambda a, b: max(signed(a), signed(b))), ("and.b32", lambda a, b: a & b),
    ("or.b32", lambda a, b: a | b), ("xor.b32", lambda a, b: a ^ b),
    ("shl.b32", lambda a, b: a << b if b < 32 else 0), ("shr.u32", lambda a, b: a >> b if b < 32 else 0),
    ("shr.s32", lambda a, b: signed(a) >> min(b, 31)),
    ("div.s32", lambda a, b: int(abs(signed(a)) // abs(signed(b))) * (1 if (signed(a) < 0) == (signed(b) < 0) else -1)),
    ("rem.u32", lambda a, b: a % b), ("div.u32", lambda a, b: a // b)])
@pytest.mark.parametrize("small", [False, True])
def test_integer_arithmetic(instruction: str, want: Callable[[int, int], int], small: bool) -> None:
    a, b, out = words(1), words(3), np.zeros(32, U32)
    if small:                                          # shift amounts around the width
        b = np.random.default_rng(5).integers(0, 36, 32).astype(U32)
    if instruction.startswith(("div", "rem")):
        b = np.maximum(b, 1)
    run_snippet(f"{LOAD_TWO} {instruction} %r3, %r1, %r2;\n st.global.b32 [%rd3], %r3;", a, b, out, read_only=2)
    assert out.tolist() == [want(x, y) & MASK for x, y in zip(a.tolist(), b.tolist(), strict=True)]


@pytest.mark.parametrize(("instruction", "want"), [
    ("brev.b32 %r3, %r1", lambda a, b: int(f"{a:032b}"[::-1], 2)),
    ("shf.l.wrap.b32 %r3, %r1, %r2, 5", lambda a, b: b << 5 | a >> 27),
    ("prmt.b32 %r3, %r1, %r2, 0x5410", lambda a, b: a & 0xFFFF | (b & 0xFFFF) << 16),
    ("prmt.b32 %r3, %r1, %r2, 0x0F37", lambda a, b: a << 24 | (255 if b >> 31 else 0) << 16 | a >> 24 << 8 | b >> 24),
    ("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %r1; mov.b32 %r3, {hi, lo}; }", lambda a, b: a >> 16 | a << 16)])
def test_bits_and_bytes(instruction: str, want: Callable[[int, int], int]) -> None:
    a, b, out = words(1), words(3), np.zeros(32, U32)
    body = instruction if instruction[0] == "{" else instruction + ";"
    run_snippet(f"{LOAD_TWO} {body}\n st.global.b32 [%rd3], %r3;", a, b, out, read_only=2)
    assert out.tolist() == [want(x, y) & MASK for x, y in zip(a.tolist(), b.tolist(), strict=True)]


@pytest.mark.parametrize(("instruction", "want"), [
    ("mul.wide.u32 %rd4, %r1, %r2", lambda a, b: a * b),
    ("mul.wide.s32 %rd4, %r1, %r2", lambda a, b: signed(a) * signed(b)),
    ("cvt.s64.s32 %rd4, %r1", lambda a, b: signed(a)), ("cvt.u64.u32 %rd4, %r1", lambda a, b: a),
    ("mov.b64 %rd4, {%r1, %r2}", lambda a, b: b << 32 | a), ("cvt.s64.s8 %rd4, %r1", lambda a, b: signed(a & 255, 8))])
def test_wide_results(instruction: str, want: Callable[[int, int], int]) -> None:
    a, b, out = words(1), words(3), np.zeros(32, np.uint64)
    run_snippet(f"""{LOAD_TWO} add.s64 %rd3, %rd3, %rd0;
        {instruction};
        st.global.b64 [%rd3], %rd4;""", a, b, out, read_only=2)
    assert out.tolist() == [want(x, y) & (1 << 64) - 1 for x, y in zip(a.tolist(), b.tolist(), strict=True)]


@pytest.mark.parametrize(("relation", "want"), [
    ("eq", lambda a, b: a == b), ("ne", lambda a, b: a < b or a > b), ("lt", lambda a, b: a < b),
    ("geu", lambda a, b: not a < b), ("neu", lambda a, b: a != b),
    ("nan", lambda a, b: a != a or b != b), ("num", lambda a, b: a == a and b == b)])
def test_float_comparisons(relation: str, want: Callable[[float, float], bool]) -> None:
    a = np.tile(np.array([0, -0.0, 1, np.nan, np.inf, -1, 2, 3], F32), 4)
    b, out = np.repeat(np.array([0, 1, np.nan, np.inf], F32), 8), np.zeros(32, U32)
    run_snippet(f"""{LOAD_TWO} setp.{relation}.f32 %p1, %r1, %r2;
        selp.b32 %r3, 1, 0, %p1;
        st.global.b32 [%rd3], %r3;""", a, b, out)
    assert out.tolist() == [int(want(x, y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]


def test_packed_floats_and_stochastic_halves() -> None:
    """f32x2 acts on both halves; cvt packs its first operand high and takes rbits[28:16] for it."""
    a, b = np.linspace(-3, 7, 32).astype(F32), np.linspace(2, 9, 32).astype(F32)
    random, out = words(9), np.zeros(96, U32)
    run_snippet("""add.s64 %rd1, %rd10, %rd0;
        ld.global.b32 %r1, [%rd1];
        add.s64 %rd2, %rd11, %rd0;
        ld.global.b32 %r2, [%rd2];
        add.s64 %rd2, %rd12, %rd0;
        ld.global.b32 %r3, [%rd2];
        add.s64 %rd3, %rd13, %rd0;
        mov.b64 %rd4, {%r1, %r2};
        fma.rn.f32x2 %rd5, %rd4, %rd4, %rd4;
        mov.b64 {%r4, %r5}, %rd5;
        st.global.b32 [%rd3], %r4;
        st.global.b32 [%rd3+128], %r5;
        cvt.rs.satfinite.f16x2.f32 %r6, %r1, %r2, %r3;
        st.global.b32 [%rd3+256], %r6;""", a, b, random, out, read_only=3)
    np.testing.assert_array_equal(out[:32].view(F32), numerics.fma(a, a, a))
    np.testing.assert_array_equal(out[32:64].view(F32), numerics.fma(b, b, b))
    high = numerics.to_f16_stochastic(a, (random >> 16 & 0x1FFF).astype(np.int64))
    low = numerics.to_f16_stochastic(b, (random & 0x1FFF).astype(np.int64))
    np.testing.assert_array_equal(out[64:], high.astype(U32) << 16 | low)


def test_codes_and_halves() -> None:
    """e4m3 codes in and out, fp16 arithmetic on both halves, and the random bits of four codes."""
    a, b, out = words(11), np.linspace(-500, 500, 32).astype(F32), np.zeros(128, U32)
    run_snippet(f"""{LOAD_TWO}
        mov.b32 {{%rs1, %rs2}}, %r1;
        cvt.rn.f16x2.e4m3x2 %r3, %rs1;
        st.global.b32 [%rd3], %r3;
        sub.rn.f16x2 %r4, %r3, 0x64003C00;
        st.global.b32 [%rd3+128], %r4;
        cvt.rn.satfinite.e4m3x2.f32 %rs3, %r2, 0f3F800000;
        cvt.u32.u16 %r5, %rs3;
        st.global.b32 [%rd3+256], %r5;
        cvt.rs.satfinite.e4m3x4.f32 %r6, {{%r2, 0f3F880000, %r2, 0f3F880000}}, %r1;
        st.global.b32 [%rd3+384], %r6;""", a, b, out, read_only=2)
    halves = numerics.from_e4m3(np.stack([a & 255, a >> 8 & 255], 1)).astype(np.float16)
    np.testing.assert_array_equal(out[:32].view(np.float16).reshape(32, 2), halves)
    np.testing.assert_array_equal(out[32:64].view(np.float16).reshape(32, 2), halves - np.array([1, 1024], np.float16))
    np.testing.assert_array_equal(out[64:96], numerics.to_e4m3(b).astype(U32) << 8 | 0x38)
    mirrored = np.array([int(f"{x:032b}"[::-1], 2) for x in a.tolist()])
    bits = [a & 0xFFFF, mirrored >> 16, a >> 16, mirrored & 0xFFFF]
    for i, random in enumerate(bits):
        x = np.full(32, 1.0625, F32) if i % 2 == 0 else b
        np.testing.assert_array_equal(out[96:] >> 8 * i & 255, numerics.to_e4m3_stochastic(x, random.astype(np.int64)))


@pytest.mark.parametrize(("mode", "by", "clamp", "source"), [
    ("idx", 5, 31, lambda i: 5), ("bfly", 6, 31, lambda i: i ^ 6),
    ("down", 3, 31, lambda i: i + 3 if i + 3 < 32 else i), ("up", 4, 0, lambda i: i - 4 if i >= 4 else i),
    ("idx", 2, 0x181F, lambda i: i // 8 * 8 + 2),
    ("down", 3, 0x181F, lambda i: i + 3 if i % 8 + 3 < 8 else i)])
def test_shuffles(mode: str, by: int, clamp: int, source: Callable[[int], int]) -> None:
    a, out = words(1, 64), np.zeros(64, U32)
    run_snippet(f"""add.s64 %rd1, %rd10, %rd0;
        ld.global.b32 %r1, [%rd1];
        shfl.sync.{mode}.b32 %r2, %r1, {by}, {clamp}, -1;
        add.s64 %rd2, %rd11, %rd0;
        st.global.b32 [%rd2], %r2;""", a, out, threads=64)
    assert out.tolist() == [a[t // 32 * 32 + source(t % 32)] for t in range(64)]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_matrix_product(kind: str) -> None:
    """Each register where the PTX manual puts it, element by element."""
    gen = np.random.default_rng(2)
    A, B, C = gen.integers(-8, 9, (16, 16)), gen.integers(-8, 9, (16, 8)), gen.integers(-99, 99, (16, 8)) * 0.5
    narrow = numerics.to_f16 if kind == "f16" else numerics.to_bf16
    a, b = (narrow(m.astype(F32)).astype(U32) for m in (A, B))
    registers, want = np.zeros((10, 32), U32), np.zeros((4, 32), F32)
    for lane in range(32):
        g, q = lane // 4, lane % 4
        for i in range(4):
            row, column = g + 8 * (i % 2), 2 * q + 8 * (i // 2)
            registers[i, lane] = a[row, column] | a[row, column + 1] << 16
            row, column = g + 8 * (i // 2), 2 * q + i % 2
            registers[6 + i, lane] = F32(C[row, column]).view(U32)
            want[i, lane] = (A @ B + C)[row, column]
        for i in range(2):
            registers[4 + i, lane] = b[2 * q + 8 * i, g] | b[2 * q + 8 * i + 1, g] << 16
    out = np.zeros((4, 32), F32)
    loads = "\n".join(f"ld.global.b32 %r{10 + i}, [%rd1+{128 * i}];" for i in range(10))
    stores = "\n".join(f"st.global.b32 [%rd2+{128 * i}], %r{20 + i};" for i in range(4))
    run_snippet(f"""add.s64 %rd1, %rd10, %rd0;
        {loads}
        mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%r20, %r21, %r22, %r23}}, \
{{%r10, %r11, %r12, %r13}}, {{%r14, %r15}}, {{%r16, %r17, %r18, %r19}};
        add.s64 %rd2, %rd11, %rd0;
        {stores}""", registers, out)
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("transposed", [False, True])
def test_matrix_loads(transposed: bool) -> None:
    """Four 8x8 matrices through shared memory; lane l names row l % 8 of matrix l // 8."""
    matrices, out = np.random.default_rng(3).integers(0, 1 << 16, (4, 8, 8)).astype(np.uint16), np.zeros((4, 32), U32)
    run_snippet(f"""shl.b32 %r1, %r0, 4;
        cvt.u64.u32 %rd1, %r1;
        add.s64 %rd1, %rd10, %rd1;
        ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%rd1];
        mov.b32 %r6, smem;
        add.s32 %r6, %r6, %r1;
        st.shared.v4.b32 [%r6], {{%r2, %r3, %r4, %r5}};
        bar.warp.sync -1;
        ldmatrix.sync.aligned.m8n8.x4{'.trans' if transposed else ''}.shared.b16 {{%r7, %r8, %r9, %r10}}, [%r6];
        movmatrix.sync.aligned.m8n8.trans.b16 %r10, %r10;
        add.s64 %rd2, %rd11, %rd0;
        st.global.b32 [%rd2], %r7;
        st.global.b32 [%rd2+128], %r8;
        st.global.b32 [%rd2+256], %r9;
        st.global.b32 [%rd2+384], %r10;""", matrices, out, shared_bytes=512)
    for i, matrix in enumerate(matrices):
        m = matrix.T if transposed else matrix
        m = m.T if i == 3 else m
        assert out[i].tolist() == [int(m[lane // 4, lane % 4 * 2]) | int(m[lane // 4, lane % 4 * 2 + 1]) << 16
                                   for lane in range(32)]


def test_wide_vectors_atomics_and_votes() -> None:
    a, out, count = words(4, 8 * 32), np.zeros(8 * 32, U32), np.zeros(2, U32)
    run_snippet("""shl.b64 %rd1, %rd0, 3;
        add.s64 %rd2, %rd10, %rd1;
        ld.global.L1::no_allocate.v4.b64 {%rd20, %rd21, %rd22, %rd23}, [%rd2];
        add.s64 %rd3, %rd11, %rd1;
        st.global.v4.b64 [%rd3], {%rd20, %rd21, %rd22, %rd23};
        setp.lt.u32 %p1, %r0, 5;
        vote.sync.ballot.b32 %r1, %p1, -1;
        elect.sync %r2|%p2, -1;
        @!%p2 bra $END;
        atom.global.acq_rel.add.u32 %r3, [%rd12], 7;
        st.global.b32 [%rd12+4], %r1;
        $END:""", a, out, count, threads=32, ctas=3)
    np.testing.assert_array_equal(out, a)
    assert count.tolist() == [21, 31]


# ---- control flow -----------------------------------------------------------------------------------

@pytest.mark.parametrize("seed", [None, 0, 1])
def test_threads_part_and_meet(seed: int | None) -> None:
    """Lanes loop as often as their number says, half of them on another path, and shuffle when all are back."""
    out = np.zeros(128, U32)
    run_snippet("""mov.b32 %r1, 0;
        mov.b32 %r2, 0;
        and.b32 %r9, %r0, 1;
        setp.eq.b32 %p3, %r9, 0;
        @%p3 bra $EVEN;
        $LOOP:
        add.s32 %r2, %r2, %r1;
        add.s32 %r1, %r1, 1;
        setp.le.u32 %p1, %r1, %r0;
        @%p1 bra $LOOP;
        bra.uni $MEET;
        $EVEN:
        mov.b32 %r2, 1000;
        $MEET:
        shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1;
        add.s64 %rd1, %rd10, %rd0;
        st.global.b32 [%rd1], %r3;""", out, threads=128, seed=seed)
    assert out.tolist() == [1000 if t % 2 else (t + 1) * (t + 2) // 2 for t in range(128)]


def test_guards() -> None:
    out = np.full(32, 9, U32)
    run_snippet("""mov.b32 %r1, 5;
        setp.lt.u32 %p1, %r0, 4;
        @%p1 mov.b32 %r1, %r0;
        add.s64 %rd1, %rd10, %rd0;
        @!%p1 st.global.b32 [%rd1], %r1;""", out)
    assert out.tolist() == [9] * 4 + [5] * 28


# ---- what it reports --------------------------------------------------------------------------------

SKIP = "setp.lt.u32 %p1, %r0, 4;\n @%p1 bra $SKIP;\n {}\n $SKIP:\n mov.b32 %r3, 1;\n"
STORE = "add.s64 %rd1, %rd10, %rd0;\n"
FAULTS = {
    "an unknown instruction": ("lop3.b32 %r1, %r0, %r0, %r0, 1;", UnknownInstructionError, r"lop3\.b32"),
    "an unknown modifier": ("add.sat.s32 %r1, %r0, %r0;", UnknownInstructionError, r"add\.sat"),
    "a byte too far": (STORE + "ld.global.b32 %r1, [%rd1+4];", MemoryFault, "not mapped"),
    "a byte too early": (STORE + "ld.global.b32 %r1, [%rd1+-4];", MemoryFault, "not mapped"),
    "an offset of 32 bits": (STORE + "and.b64 %rd1, %rd1, 4294967295;\n ld.global.b32 %r1, [%rd1];", MemoryFault,
                             "not mapped"),
    "a misaligned vector": ("add.s64 %rd1, %rd10, 8;\n ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1];", MemoryFault,
                            "aligned to 16"),
    "a store to an input": (STORE + "st.global.b32 [%rd1], %r0;", MemoryFault, "read-only"),
    "an unwritten register": (SKIP.format("mov.b32 %r1, 1;") + "add.s32 %r2, %r1, 1;", UninitializedRead, "%r1"),
    "unwritten shared memory": ("mov.b32 %r1, smem;\n ld.shared.b32 %r2, [%r1];", UninitializedRead, "offset 0"),
    "shared memory that is not there": ("mov.b32 %r1, smem;\n st.shared.b32 [%r1+1024], %r0;", MemoryFault, "1024"),
    "a barrier that some leave out": (SKIP.format("bar.sync 0;"), BarrierError, "bar.sync"),
    "a shuffle that some leave out": (SKIP.format("shfl.sync.idx.b32 %r1, %r0, 0, 31, -1;"), BarrierError,
                                      "no thread can go on"),
    "disagreeing lanes": ("mov.b32 %r1, smem;\n st.shared.b32 [%r1], %r0;", RaceError, "different values"),
    "an uninitialised mbarrier": ("mov.b32 %r1, smem;\n mbarrier.arrive.shared.b64 %rd1, [%r1];", UninitializedRead,
                                  "not initialised")}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_reported(fault: str) -> None:
    body, kind, message = FAULTS[fault]
    with pytest.raises(kind, match=message):
        run_snippet(body, np.zeros(32, U32), shared_bytes=1024, read_only=1)


def test_memory_before_the_grid_before_has_ended() -> None:
    body = STORE + "ld.global.b32 %r1, [%rd1];"
    run_snippet("griddepcontrol.wait;\n" + body, np.zeros(32, U32), dependent=True)
    run_snippet(body, np.zeros(32, U32))
    with pytest.raises(BarrierError, match="griddepcontrol"):
        run_snippet(body, np.zeros(32, U32), dependent=True)


NEIGHBOUR = """
    shl.b32 %r1, %r0, 2;
    mov.b32 %r2, smem;
    add.s32 %r1, %r1, %r2;
    st.shared.b32 [%r1], %r0;
    {between}
    xor.b32 %r3, %r0, {distance};
    shl.b32 %r3, %r3, 2;
    add.s32 %r3, %r3, %r2;
    ld.shared.b32 %r4, [%r3];
    {after}
    st.shared.b32 [%r1], %r4;
    add.s64 %rd1, %rd10, %rd0;
    st.global.b32 [%rd1], %r4;
"""


@pytest.mark.parametrize(("between", "after", "distance", "fine"), [
    ("bar.sync 0;", "bar.sync 0;", 32, True), ("bar.sync 0;", "bar.sync 0;", 1, True),
    ("bar.warp.sync -1;", "bar.warp.sync -1;", 1, True), ("bar.sync 0;", "", 32, False), ("", "bar.sync 0;", 32, False),
    ("bar.warp.sync -1;", "bar.sync 0;", 32, False), ("bar.warp.sync -1;", "", 1, False),
    ("", "bar.warp.sync -1;", 1, False)])
def test_races_in_shared_memory(between: str, after: str, distance: int, fine: bool) -> None:
    out = np.zeros(64, U32)
    body = NEIGHBOUR.format(between=between, after=after, distance=distance)
    if fine:
        run_snippet(body, out, threads=64, shared_bytes=256)
        assert out.tolist() == [t ^ distance for t in range(64)]
    else:
        with pytest.raises(RaceError):
            run_snippet(body, out, threads=64, shared_bytes=256)


#: Warp 1 fills two stages in turn by bulk copies, warp 0 adds them up. mbarriers: full at 256, empty at 272.
PIPELINE = """
    mov.b32 %r1, smem;
    setp.ne.b32 %p1, %r0, 0;
    @%p1 bra $READY;
    mov.b32 %r2, 1;
    mbarrier.init.shared.b64 [%r1+256], %r2;
    mbarrier.init.shared.b64 [%r1+264], %r2;
    mbarrier.init.shared.b64 [%r1+272], %r2;
    mbarrier.init.shared.b64 [%r1+280], %r2;
    fence.mbarrier_init.release.cluster;
    $READY:
    bar.sync 0;
    mov.b32 %r3, 0;
    mov.b32 %r4, 0;
    setp.gt.u32 %p2, %r0, 31;
    @%p2 bra $PRODUCE;
    $CONSUME:
    and.b32 %r5, %r3, 1;
    shr.u32 %r6, %r3, 1;
    and.b32 %r6, %r6, 1;
    shl.b32 %r7, %r5, 3;
    add.s32 %r7, %r7, %r1;
    add.s32 %r8, %r7, 256;
    $FULL:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r8], %r6, 10000000;
    @!%p3 bra $FULL;
    shl.b32 %r9, %r5, 7;
    add.s32 %r9, %r9, %r1;
    shl.b32 %r10, %r0, 2;
    add.s32 %r9, %r9, %r10;
    ld.shared.b32 %r11, [%r9];
    add.s32 %r4, %r4, %r11;
    bar.warp.sync -1;
    setp.ne.b32 %p4, %r0, 0;
    @%p4 bra $FREED;
    mbarrier.arrive.shared.b64 %rd5, [%r7+272];
    $FREED:
    add.s32 %r3, %r3, 1;
    setp.lt.u32 %p5, %r3, 6;
    @%p5 bra $CONSUME;
    add.s64 %rd1, %rd11, %rd0;
    st.global.b32 [%rd1], %r4;
    ret;
    $PRODUCE:
    setp.ne.b32 %p6, %r0, 32;
    @%p6 bra $DONE;
    $NEXT:
    and.b32 %r5, %r3, 1;
    shr.u32 %r6, %r3, 1;
    and.b32 %r6, %r6, 1;
    xor.b32 %r6, %r6, 1;
    shl.b32 %r7, %r5, 3;
    add.s32 %r7, %r7, %r1;
    add.s32 %r8, %r7, 272;
    $EMPTY:
    mbarrier.try_wait.parity.shared.b64 %p7, [%r8], %r6, 10000000;
    @!%p7 bra $EMPTY;
    add.s32 %r8, %r7, 256;
    mbarrier.arrive.expect_tx.shared.b64 %rd6, [%r8], 128;
    shl.b32 %r9, %r5, 7;
    add.s32 %r9, %r9, %r1;
    mul.wide.u32 %rd7, %r3, 128;
    add.s64 %rd7, %rd7, %rd10;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r9], [%rd7], 128, [%r8];
    add.s32 %r3, %r3, 1;
    setp.lt.u32 %p8, %r3, 6;
    @%p8 bra $NEXT;
    $DONE:
"""


def run_pipeline(body: str, seed: int | None = None) -> bool:
    """Whether the sums are right."""
    a, out = words(6, 6 * 32), np.zeros(32, U32)
    run_snippet(body, a, out, threads=64, ctas=2, shared_bytes=288, seed=seed, read_only=1)
    return bool((out == a.reshape(6, 32).sum(0, dtype=U32)).all())


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_pipeline(seed: int | None) -> None:
    assert run_pipeline(PIPELINE, seed)


STUCK = (BarrierError, "no thread can go on")
MANY = (BarrierError, "more arrivals")


@pytest.mark.parametrize(("line", "instead", "report"), [
    ("bar.sync 0;", "", (RaceError, "offset 256")), ("bar.warp.sync -1;", "", (RaceError, "which others read")),
    ("fence.mbarrier_init.release.cluster;", "", (BarrierError, "fence.mbarrier_init")),
    ("@!%p3 bra $FULL;\n", "", (UninitializedRead, "never written")), ("@!%p7 bra $EMPTY;\n", "", MANY),
    ("[%r8], 128;", "[%r8], 112;", STUCK), ("[%r8], 128;", "[%r8], 144;", STUCK),
    ("[%rd7], 128, [%r8];", "[%rd7], 120, [%r8];", (MemoryFault, "120 bytes")),
    ("mbarrier.arrive.shared.b64 %rd5, [%r7+272];", "", STUCK), ("@%p4 bra $FREED;\n", "", MANY),
    ("mbarrier.init.shared.b64 [%r1+280], %r2;", "", (UninitializedRead, "not initialised")),
    ("xor.b32 %r6, %r6, 1;\n", "", STUCK)])
def test_faults_of_a_pipeline_are_reported(line: str, instead: str, report: tuple[type[PtxError], str]) -> None:
    assert line in PIPELINE
    body = PIPELINE.replace(line, instead)
    for predicate in ("%p3", "%p7"):
        if line.startswith(f"@!{predicate}"):       # without its loop a wait is none: drop it too
            body = "\n".join(text for text in body.splitlines() if f"{predicate}, [%r8]" not in text)
    with pytest.raises(report[0], match=report[1]):
        run_pipeline(body)
