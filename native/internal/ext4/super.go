package ext4

import (
	"fmt"
	"syscall"

	"gvx.dev/gvx/native/internal/blockdev"
)

// Offsets in the superblock, names as in the format documentation.
const (
	sInodesCount     = 0
	sBlocksCountLo   = 4
	sRBlocksCountLo  = 8
	sFreeBlocksLo    = 12
	sFreeInodes      = 16
	sFirstDataBlock  = 20
	sLogBlockSize    = 24
	sLogClusterSize  = 28
	sBlocksPerGroup  = 32
	sInodesPerGroup  = 40
	sMtime           = 44
	sWtime           = 48
	sMntCount        = 52
	sMagic           = 56
	sState           = 58
	sRevLevel        = 76
	sFirstIno        = 84
	sInodeSize       = 88
	sFeatureCompat   = 92
	sFeatureIncompat = 96
	sFeatureRoCompat = 100
	sUUID            = 104
	sVolumeName      = 120
	sReservedGdt     = 206
	sJournalInum     = 224
	sLastOrphan      = 232
	sHashSeed        = 236
	sDefHashVersion  = 252
	sDescSize        = 254
	sFirstMetaBG     = 260
	sBlocksCountHi   = 336
	sRBlocksCountHi  = 340
	sFreeBlocksHi    = 344
	sWantExtraIsize  = 350
	sFlags           = 352
	sLogGroupsFlex   = 372
	sBackupBgs       = 588
	sChecksumSeed    = 624
	sWtimeHi         = 628
	sMtimeHi         = 629
	sOrphanFile      = 640
	sChecksum        = 1020

	superMagic      = 0xEF53
	stateValid      = 1
	stateError      = 2
	flagsUnsigned   = 2 // s_flags: directory hashes take names as unsigned bytes
	superSize       = 1024
	superOffset     = 1024
	rootIno         = 2
	resizeIno       = 7
	defaultFirstIno = 11
)

// super holds the fields of the superblock that never change while open.
type super struct {
	inodesCount    uint32
	blocksCount    uint64
	reservedBlocks uint64
	firstDataBlock uint64
	blockSize      int
	blockBits      uint
	blocksPerGroup uint32
	inodesPerGroup uint32
	firstIno       uint32
	inodeSize      int
	wantExtra      int
	compat         uint32
	incompat       uint32
	roCompat       uint32
	uuid           [16]byte
	label          string
	reservedGdt    uint32
	journalIno     uint32
	hashSeed       [4]uint32
	hashVersion    uint8
	unsignedHash   bool
	descSize       int
	firstMetaBG    uint32
	flexSize       uint32 // groups a flex group, 1 without flex_bg
	backupBgs      [2]uint32
	seed           uint32 // start of all metadata checksums
	groups         uint32
}

// parseSuper checks magic, checksum and geometry of the 1024 bytes raw.
func parseSuper(raw []byte, devSize int64) (*super, error) {
	if m := le.Uint16(raw[sMagic:]); m != superMagic {
		return nil, fmt.Errorf("ext4: no ext4 superblock: magic is %#x, not %#x: %w", m, superMagic, syscall.EINVAL)
	}
	sb := &super{
		inodesCount:    le.Uint32(raw[sInodesCount:]),
		blocksCount:    uint64(le.Uint32(raw[sBlocksCountLo:])),
		reservedBlocks: uint64(le.Uint32(raw[sRBlocksCountLo:])),
		firstDataBlock: uint64(le.Uint32(raw[sFirstDataBlock:])),
		blocksPerGroup: le.Uint32(raw[sBlocksPerGroup:]),
		inodesPerGroup: le.Uint32(raw[sInodesPerGroup:]),
		firstIno:       defaultFirstIno,
		inodeSize:      128,
		reservedGdt:    uint32(le.Uint16(raw[sReservedGdt:])),
		journalIno:     le.Uint32(raw[sJournalInum:]),
		hashVersion:    raw[sDefHashVersion],
		unsignedHash:   le.Uint32(raw[sFlags:])&flagsUnsigned != 0,
		descSize:       32,
		firstMetaBG:    le.Uint32(raw[sFirstMetaBG:]),
		flexSize:       1,
		backupBgs:      [2]uint32{le.Uint32(raw[sBackupBgs:]), le.Uint32(raw[sBackupBgs+4:])},
	}
	copy(sb.uuid[:], raw[sUUID:])
	label := raw[sVolumeName : sVolumeName+16]
	for len(label) > 0 && label[len(label)-1] == 0 {
		label = label[:len(label)-1]
	}
	sb.label = string(label)
	for i := range sb.hashSeed {
		sb.hashSeed[i] = le.Uint32(raw[sHashSeed+4*i:])
	}
	if le.Uint32(raw[sRevLevel:]) >= 1 {
		sb.firstIno = le.Uint32(raw[sFirstIno:])
		sb.inodeSize = int(le.Uint16(raw[sInodeSize:]))
		sb.compat = le.Uint32(raw[sFeatureCompat:])
		sb.incompat = le.Uint32(raw[sFeatureIncompat:])
		sb.roCompat = le.Uint32(raw[sFeatureRoCompat:])
	}
	if sb.has(roCompatMetadataCsum) {
		if raw[373] != 1 {
			return nil, corruptf("superblock: checksum type %d", raw[373])
		}
		if got, want := superChecksum(raw), le.Uint32(raw[sChecksum:]); got != want {
			return nil, corruptf("superblock: checksum %#x, counted %#x", want, got)
		}
		sb.seed = crc32c(^uint32(0), sb.uuid[:])
		if sb.incompat&incompatCsumSeed != 0 {
			sb.seed = le.Uint32(raw[sChecksumSeed:])
		}
	}
	if sb.incompat&incompat64bit != 0 {
		sb.blocksCount |= uint64(le.Uint32(raw[sBlocksCountHi:])) << 32
		sb.reservedBlocks |= uint64(le.Uint32(raw[sRBlocksCountHi:])) << 32
		sb.descSize = int(le.Uint16(raw[sDescSize:]))
		if sb.descSize < 64 || sb.descSize > 1024 || sb.descSize&(sb.descSize-1) != 0 {
			return nil, corruptf("superblock: descriptor size %d", sb.descSize)
		}
	}
	log := le.Uint32(raw[sLogBlockSize:])
	if log > 6 {
		return nil, corruptf("superblock: block size 2^%d", log+10)
	}
	sb.blockBits = uint(log) + 10
	sb.blockSize = 1 << sb.blockBits
	if f := raw[sLogGroupsFlex]; sb.incompat&incompatFlexBG != 0 && f > 0 && f < 31 {
		sb.flexSize = 1 << f
	}
	if sb.inodeSize > 128 {
		sb.wantExtra = min(max(int(le.Uint16(raw[sWantExtraIsize:])), 32), sb.inodeSize-128) &^ 3
	}
	return sb, sb.checkGeometry(raw, devSize)
}

// checkGeometry makes sure that later arithmetic stays in bounds.
func (sb *super) checkGeometry(raw []byte, devSize int64) error {
	bs := uint64(sb.blockSize)
	switch {
	case sb.inodeSize < 128 || sb.inodeSize > sb.blockSize || sb.inodeSize&(sb.inodeSize-1) != 0:
		return corruptf("superblock: inode size %d", sb.inodeSize)
	case sb.blockSize == 1024 != (sb.firstDataBlock == 1) && sb.firstDataBlock > 1:
		return corruptf("superblock: first data block %d", sb.firstDataBlock)
	case sb.blocksPerGroup == 0 || sb.blocksPerGroup%8 != 0:
		return corruptf("superblock: %d blocks a group", sb.blocksPerGroup)
	case !sb.has(roCompatBigalloc) && uint64(sb.blocksPerGroup) > 8*bs:
		return corruptf("superblock: %d blocks a group", sb.blocksPerGroup)
	case sb.inodesPerGroup == 0 || uint64(sb.inodesPerGroup) > 8*bs:
		return corruptf("superblock: %d inodes a group", sb.inodesPerGroup)
	case sb.blocksCount <= sb.firstDataBlock || sb.blocksCount > 1<<48:
		return corruptf("superblock: %d blocks", sb.blocksCount)
	case devSize < 0 || sb.blocksCount > uint64(devSize)/bs:
		return corruptf("superblock: %d blocks of %d bytes do not fit in the device of %d bytes", sb.blocksCount, bs, devSize)
	case sb.firstIno < defaultFirstIno || sb.firstIno > sb.inodesCount:
		return corruptf("superblock: first inode %d", sb.firstIno)
	case !sb.has(roCompatBigalloc) && le.Uint32(raw[sLogClusterSize:]) != le.Uint32(raw[sLogBlockSize:]):
		return corruptf("superblock: cluster size differs from block size without bigalloc")
	}
	groups := (sb.blocksCount - sb.firstDataBlock + uint64(sb.blocksPerGroup) - 1) / uint64(sb.blocksPerGroup)
	if groups*uint64(sb.inodesPerGroup) != uint64(sb.inodesCount) {
		return corruptf("superblock: %d inodes in %d groups of %d", sb.inodesCount, groups, sb.inodesPerGroup)
	}
	sb.groups = uint32(groups)
	return nil
}

// readSuper reads and parses the primary superblock.
func readSuper(dev blockdev.Device) (*super, []byte, error) {
	if dev.Size() < superOffset+superSize {
		return nil, nil, fmt.Errorf("ext4: device of %d bytes is too small for a superblock: %w", dev.Size(), syscall.EINVAL)
	}
	raw := make([]byte, superSize)
	if _, err := dev.ReadAt(raw, superOffset); err != nil {
		return nil, nil, fmt.Errorf("ext4: superblock: %w", err)
	}
	sb, err := parseSuper(raw, dev.Size())
	return sb, raw, err
}

// hasSuper tells whether group g holds a copy of superblock and descriptors.
func (sb *super) hasSuper(g uint32) bool {
	if g == 0 {
		return true
	}
	if sb.compat&compatSparseSuper2 != 0 {
		return g == sb.backupBgs[0] || g == sb.backupBgs[1]
	}
	if g == 1 || !sb.has(roCompatSparseSuper) {
		return true
	}
	for _, p := range []uint32{3, 5, 7} {
		n := uint64(p)
		for n < uint64(g) {
			n *= uint64(p)
		}
		if n == uint64(g) {
			return true
		}
	}
	return false
}

// gdtBlocks is the number of blocks the descriptors take.
func (sb *super) gdtBlocks() uint64 {
	per := uint64(sb.blockSize / sb.descSize)
	return (uint64(sb.groups) + per - 1) / per
}

// groupStart is the first block of group g.
func (sb *super) groupStart(g uint32) uint64 {
	return sb.firstDataBlock + uint64(g)*uint64(sb.blocksPerGroup)
}

// groupBlocks is the number of blocks of group g (the last may be short).
func (sb *super) groupBlocks(g uint32) uint32 {
	return uint32(min(uint64(sb.blocksPerGroup), sb.blocksCount-sb.groupStart(g)))
}

// baseMeta is the number of blocks at the start of group g taken by superblock,
// descriptors and room for more descriptors (not under meta_bg, which is never written).
func (sb *super) baseMeta(g uint32) uint32 {
	if !sb.hasSuper(g) {
		return 0
	}
	return uint32(1 + sb.gdtBlocks() + uint64(sb.reservedGdt))
}

// inodeTableBlocks is the length of each group's inode table.
func (sb *super) inodeTableBlocks() uint64 {
	return (uint64(sb.inodesPerGroup)*uint64(sb.inodeSize) + uint64(sb.blockSize) - 1) / uint64(sb.blockSize)
}

// inData tells whether [blk, blk+n) are blocks a file may own, as far as geometry tells.
func (sb *super) inData(blk, n uint64) bool {
	return blk > sb.firstDataBlock && n <= sb.blocksCount && blk <= sb.blocksCount-n
}
