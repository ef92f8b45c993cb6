package ext4

import (
	"fmt"
	"strings"
	"syscall"
)

// Feature bits, names as in the format documentation.
const (
	compatHasJournal   = 0x4
	compatExtAttr      = 0x8
	compatResizeInode  = 0x10
	compatDirIndex     = 0x20
	compatSparseSuper2 = 0x200
	compatOrphanFile   = 0x1000

	incompatCompression = 0x1
	incompatFiletype    = 0x2
	incompatRecover     = 0x4
	incompatJournalDev  = 0x8
	incompatMetaBG      = 0x10
	incompatExtents     = 0x40
	incompat64bit       = 0x80
	incompatMMP         = 0x100
	incompatFlexBG      = 0x200
	incompatEAInode     = 0x400
	incompatDirdata     = 0x1000
	incompatCsumSeed    = 0x2000
	incompatLargedir    = 0x4000
	incompatInlineData  = 0x8000
	incompatEncrypt     = 0x10000
	incompatCasefold    = 0x20000

	roCompatSparseSuper  = 0x1
	roCompatLargeFile    = 0x2
	roCompatBtreeDir     = 0x4
	roCompatHugeFile     = 0x8
	roCompatGDTCsum      = 0x10
	roCompatDirNlink     = 0x20
	roCompatExtraIsize   = 0x40
	roCompatQuota        = 0x100
	roCompatBigalloc     = 0x200
	roCompatMetadataCsum = 0x400
	roCompatReadonly     = 0x1000
	roCompatProject      = 0x2000
	roCompatSharedBlocks = 0x4000
	roCompatVerity       = 0x8000
	roCompatOrphanPres   = 0x10000
)

// The masks that gate Open. A volume with an incompat bit outside
// incompatReadable is refused; with one outside incompatWritable, without
// extents, or with a ro_compat bit outside roCompatWritable, it opens read-only.
// Compat bits never matter.
const (
	incompatReadable = incompatFiletype | incompatRecover | incompatMetaBG | incompatExtents | incompat64bit |
		incompatMMP | incompatFlexBG | incompatCsumSeed | incompatLargedir | incompatInlineData
	incompatWritable = incompatFiletype | incompatRecover | incompatExtents | incompat64bit |
		incompatFlexBG | incompatCsumSeed | incompatLargedir
	roCompatWritable = roCompatSparseSuper | roCompatLargeFile | roCompatHugeFile | roCompatGDTCsum |
		roCompatDirNlink | roCompatExtraIsize | roCompatMetadataCsum
)

var incompatNames = map[uint32]string{
	incompatCompression: "compression", incompatFiletype: "filetype", incompatRecover: "needs_recovery",
	incompatJournalDev: "journal_dev", incompatMetaBG: "meta_bg", incompatExtents: "extent", incompat64bit: "64bit",
	incompatMMP: "mmp", incompatFlexBG: "flex_bg", incompatEAInode: "ea_inode", incompatDirdata: "dirdata",
	incompatCsumSeed: "metadata_csum_seed", incompatLargedir: "large_dir", incompatInlineData: "inline_data",
	incompatEncrypt: "encrypt", incompatCasefold: "casefold",
}

var roCompatNames = map[uint32]string{
	roCompatBtreeDir: "btree_dir", roCompatQuota: "quota", roCompatBigalloc: "bigalloc", 0x800: "replica",
	roCompatReadonly: "read-only", roCompatProject: "project", roCompatSharedBlocks: "shared_blocks",
	roCompatVerity: "verity", roCompatOrphanPres: "orphan_present",
}

// featureList spells the bits of mask.
func featureList(mask uint32, names map[uint32]string) string {
	var out []string
	for bit := uint32(1); bit != 0; bit <<= 1 {
		if mask&bit == 0 {
			continue
		}
		if n, ok := names[bit]; ok {
			out = append(out, n)
		} else {
			out = append(out, fmt.Sprintf("%#x", bit))
		}
	}
	return strings.Join(out, " ")
}

// checkFeatures refuses what cannot be read and says why a volume that can be
// read must not be written (empty: it may).
func (sb *super) checkFeatures() (readOnlyBecause string, err error) {
	if bad := sb.incompat &^ incompatReadable; bad != 0 {
		return "", fmt.Errorf("ext4: unsupported incompat feature: %s: %w", featureList(bad, incompatNames), syscall.EOPNOTSUPP)
	}
	switch {
	case sb.incompat&^incompatWritable != 0:
		return "feature " + featureList(sb.incompat&^incompatWritable, incompatNames), nil
	case sb.roCompat&^roCompatWritable != 0:
		return "feature " + featureList(sb.roCompat&^roCompatWritable, roCompatNames), nil
	case sb.incompat&incompatExtents == 0:
		return "no extent feature (ext2 or ext3)", nil
	case sb.compat&compatHasJournal != 0 && sb.journalIno == 0:
		return "a journal on another device", nil
	case sb.incompat&incompatFiletype == 0:
		return "no filetype feature", nil
	}
	return "", nil
}

func (sb *super) has(roCompat uint32) bool { return sb.roCompat&roCompat != 0 }
