package jbd2

import (
	"encoding/binary"
	"hash/crc32"
)

// All of the log is big-endian.
var be = binary.BigEndian

const (
	magic = 0xC03B3998

	kindDescriptor = 1
	kindCommit     = 2
	kindSuperV1    = 3
	kindSuperV2    = 4
	kindRevoke     = 5

	incompatRevoke  = 0x1
	incompat64bit   = 0x2
	incompatAsync   = 0x4
	incompatCsumV2  = 0x8
	incompatCsumV3  = 0x10
	incompatFast    = 0x20
	incompatKnown   = incompatRevoke | incompat64bit | incompatAsync | incompatCsumV2 | incompatCsumV3 | incompatFast
	csumCRC32C      = 4 // s_checksum_type
	defaultFCBlocks = 256

	// Tag flags.
	flagEscape   = 1
	flagSameUUID = 2
	flagLast     = 8

	headerSize   = 12
	revokeHeader = 16
	uuidSize     = 16

	// Offsets in the superblock.
	sBlockType    = 4
	sBlockSize    = 12
	sMaxLen       = 16
	sFirst        = 20
	sSequence     = 24
	sStart        = 28
	sErrno        = 32
	sCompat       = 36
	sIncompat     = 40
	sRoCompat     = 44
	sUUID         = 48
	sNrUsers      = 64
	sChecksumType = 80
	sNumFCBlocks  = 84
	sChecksum     = 252
	superSize     = 1024
	superV1Size   = 36

	// Offsets in a commit block.
	cChecksum = 16
	cSeconds  = 48
	cNanos    = 56
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// crc32c continues crc over p as the format counts: no inversion at either end.
func crc32c(crc uint32, p []byte) uint32 { return ^crc32.Update(^crc, castagnoli, p) }

// sumAround is the checksum of p with the four bytes at off taken as zero.
func sumAround(seed uint32, p []byte, off int) uint32 {
	var zero [4]byte
	crc := crc32c(seed, p[:off])
	crc = crc32c(crc, zero[:])
	return crc32c(crc, p[off+4:])
}

// putHeader begins a block of the log.
func putHeader(p []byte, kind, sequence uint32) {
	be.PutUint32(p, magic)
	be.PutUint32(p[4:], kind)
	be.PutUint32(p[8:], sequence)
}
