package ext4

import "math/bits"

// Directory hash versions as stored in an index root and the superblock.
const (
	hashLegacy  = 0
	hashHalfMD4 = 1
	hashTea     = 2
	hashEOF     = 0x7fffffff
)

// dirHash gives the hash of a name, its lowest bit clear; ok is false for
// versions this package does not know.
func (sb *super) dirHash(version uint8, name string) (hash uint32, ok bool) {
	seed := [4]uint32{0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476}
	if sb.hashSeed != [4]uint32{} {
		seed = sb.hashSeed
	}
	switch version {
	case hashLegacy:
		hash = legacyHash(name, sb.unsignedHash)
	case hashHalfMD4:
		for p := name; len(p) > 0; p = p[min(32, len(p)):] {
			var in [8]uint32
			hashWords(p, in[:], sb.unsignedHash)
			halfMD4(&seed, &in)
		}
		hash = seed[1]
	case hashTea:
		for p := name; len(p) > 0; p = p[min(16, len(p)):] {
			var in [4]uint32
			hashWords(p, in[:], sb.unsignedHash)
			tea(&seed, &in)
		}
		hash = seed[0]
	default:
		return 0, false
	}
	hash &^= 1
	if hash == hashEOF<<1 {
		hash = (hashEOF - 1) << 1
	}
	return hash, true
}

// hashChar widens a byte as the volume's maker's char did.
func hashChar(c byte, unsigned bool) uint32 {
	if unsigned {
		return uint32(c)
	}
	return uint32(int32(int8(c)))
}

// hashWords packs the start of a name, padded with its length.
func hashWords(p string, out []uint32, unsigned bool) {
	pad := uint32(len(p)) | uint32(len(p))<<8
	pad |= pad << 16
	p = p[:min(len(p), 4*len(out))]
	for k := range out {
		v := pad
		for n := 4 * k; n < 4*k+4 && n < len(p); n++ {
			v = hashChar(p[n], unsigned) + v<<8
		}
		out[k] = v
	}
}

func legacyHash(name string, unsigned bool) uint32 {
	h0, h1 := uint32(0x12a3fe2d), uint32(0x37abe8f9)
	for k := range len(name) {
		h := h1 + (h0 ^ hashChar(name[k], unsigned)*7152373)
		if h&0x80000000 != 0 {
			h -= 0x7fffffff
		}
		h1, h0 = h0, h
	}
	return h0 << 1
}

// halfMD4 is MD4's compression cut to three rounds of eight steps.
func halfMD4(s *[4]uint32, in *[8]uint32) {
	a, b, c, d := s[0], s[1], s[2], s[3]
	step := func(f, x uint32, rot int) {
		a, b, c, d = d, bits.RotateLeft32(a+f+x, rot), b, c
	}
	for _, k := range [8]int{0, 1, 2, 3, 4, 5, 6, 7} {
		step(d^b&(c^d), in[k], [4]int{3, 7, 11, 19}[k%4])
	}
	for n, k := range [8]int{1, 3, 5, 7, 0, 2, 4, 6} {
		step(b&c+(b^c)&d, in[k]+0x5A827999, [4]int{3, 5, 9, 13}[n%4])
	}
	for n, k := range [8]int{3, 7, 2, 6, 1, 5, 0, 4} {
		step(b^c^d, in[k]+0x6ED9EBA1, [4]int{3, 9, 11, 15}[n%4])
	}
	s[0] += a
	s[1] += b
	s[2] += c
	s[3] += d
}

// tea is sixteen rounds of the Tiny Encryption Algorithm.
func tea(s *[4]uint32, k *[4]uint32) {
	x, y := s[0], s[1]
	sum := uint32(0)
	for range 16 {
		sum += 0x9E3779B9
		x += (y<<4 + k[0]) ^ (y + sum) ^ (y>>5 + k[1])
		y += (x<<4 + k[2]) ^ (x + sum) ^ (x>>5 + k[3])
	}
	s[0] += x
	s[1] += y
}
