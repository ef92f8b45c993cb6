package ext4

import "math/bits"

// Bitmaps are little-endian bit arrays whose length is a multiple of 8 bytes.
// busy, where given, is a second bitmap of equal length (or nil): a bit set in
// either counts as set.

func testBit(b []byte, i uint32) bool { return b[i>>3]&(1<<(i&7)) != 0 }

// setBits sets or clears [from, from+n).
func setBits(b []byte, from, n uint32, on bool) {
	for i, end := from, from+n; i < end; {
		if i&7 == 0 && end-i >= 8 {
			if on {
				b[i>>3] = 0xff
			} else {
				b[i>>3] = 0
			}
			i += 8
			continue
		}
		if on {
			b[i>>3] |= 1 << (i & 7)
		} else {
			b[i>>3] &^= 1 << (i & 7)
		}
		i++
	}
}

func bitWord(b, busy []byte, w uint32) uint64 {
	v := le.Uint64(b[w*8:])
	if busy != nil {
		v |= le.Uint64(busy[w*8:])
	}
	return v
}

// nextClear is the first clear bit in [i, end), or end.
func nextClear(b, busy []byte, i, end uint32) uint32 {
	for i < end {
		v := ^bitWord(b, busy, i>>6) >> (i & 63)
		if v != 0 {
			return min(i+uint32(bits.TrailingZeros64(v)), end)
		}
		i = (i | 63) + 1
	}
	return end
}

// nextSet is the first set bit in [i, end), or end.
func nextSet(b, busy []byte, i, end uint32) uint32 {
	for i < end {
		v := bitWord(b, busy, i>>6) >> (i & 63)
		if v != 0 {
			return min(i+uint32(bits.TrailingZeros64(v)), end)
		}
		i = (i | 63) + 1
	}
	return end
}

// countClear counts clear bits in [0, n).
func countClear(b []byte, n uint32) uint32 {
	var c uint32
	for i := uint32(0); i < n; {
		if i&63 == 0 && n-i >= 64 {
			c += uint32(bits.OnesCount64(^le.Uint64(b[i>>3:])))
			i += 64
			continue
		}
		if !testBit(b, i) {
			c++
		}
		i++
	}
	return c
}

// allState tells whether every bit of [from, from+n) is on (or off).
func allState(b []byte, from, n uint32, on bool) bool {
	if on {
		return nextClear(b, nil, from, from+n) == from+n
	}
	return nextSet(b, nil, from, from+n) == from+n
}
