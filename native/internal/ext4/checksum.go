package ext4

import (
	"encoding/binary"
	"hash/crc32"
)

var le = binary.LittleEndian

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// crc32c continues crc over p the way the format counts: no inversion at either end.
func crc32c(crc uint32, p []byte) uint32 {
	return ^crc32.Update(^crc, castagnoli, p)
}

func crc32cU32(crc, v uint32) uint32 {
	var b [4]byte
	le.PutUint32(b[:], v)
	return crc32c(crc, b[:])
}

var crc16Table = func() (t [256]uint16) {
	for i := range t {
		c := uint16(i)
		for range 8 {
			if c&1 != 0 {
				c = c>>1 ^ 0xA001
			} else {
				c >>= 1
			}
		}
		t[i] = c
	}
	return t
}()

// crc16 is the checksum of group descriptors under gdt_csum (reflected 0x8005).
func crc16(crc uint16, p []byte) uint16 {
	for _, b := range p {
		crc = crc>>8 ^ crc16Table[byte(crc)^b]
	}
	return crc
}

// superChecksum covers everything before s_checksum.
func superChecksum(raw []byte) uint32 { return crc32c(^uint32(0), raw[:1020]) }

// descChecksum gives bg_checksum of a descriptor; 0 when the volume has none.
func (fs *FS) descChecksum(g uint32, d []byte) uint16 {
	switch {
	case fs.sb.has(roCompatMetadataCsum):
		crc := crc32cU32(fs.sb.seed, g)
		crc = crc32c(crc, d[:30])
		crc = crc32c(crc, []byte{0, 0})
		if len(d) > 32 {
			crc = crc32c(crc, d[32:])
		}
		return uint16(crc)
	case fs.sb.has(roCompatGDTCsum):
		crc := crc16(^uint16(0), fs.sb.uuid[:])
		var b [4]byte
		le.PutUint32(b[:], g)
		crc = crc16(crc, b[:])
		crc = crc16(crc, d[:30])
		if len(d) > 32 { // the field itself is skipped, unlike with metadata_csum
			crc = crc16(crc, d[32:])
		}
		return crc
	}
	return 0
}

// inodeSeed starts the checksums of everything that belongs to an inode.
func (fs *FS) inodeSeed(ino, generation uint32) uint32 {
	return crc32cU32(crc32cU32(fs.sb.seed, ino), generation)
}

// inodeChecksum covers the whole inode with both checksum fields taken as zero.
func (fs *FS) inodeChecksum(ino uint32, raw []byte) uint32 {
	var zero [2]byte
	crc := fs.inodeSeed(ino, le.Uint32(raw[offGeneration:]))
	crc = crc32c(crc, raw[:offChecksumLo])
	crc = crc32c(crc, zero[:])
	crc = crc32c(crc, raw[offChecksumLo+2:128])
	if len(raw) > 128 {
		if hasExtra(raw, offChecksumHi+2) {
			crc = crc32c(crc, raw[128:offChecksumHi])
			crc = crc32c(crc, zero[:])
			crc = crc32c(crc, raw[offChecksumHi+2:])
		} else {
			crc = crc32c(crc, raw[128:])
		}
	}
	return crc
}

// extentChecksum covers an extent block up to its tail.
func extentChecksum(seed uint32, b []byte) (crc uint32, tail int) {
	tail = 12 + 12*int(le.Uint16(b[4:]))
	return crc32c(seed, b[:tail]), tail
}

// xattrChecksum covers an xattr block and its own address.
func (fs *FS) xattrChecksum(blk uint64, b []byte) uint32 {
	var addr [8]byte
	var zero [4]byte
	le.PutUint64(addr[:], blk)
	crc := crc32c(fs.sb.seed, addr[:])
	crc = crc32c(crc, b[:16])
	crc = crc32c(crc, zero[:])
	return crc32c(crc, b[20:])
}
