package ext4

import "testing"

// TestCacheIsBounded: clean buffers go above the limit, dirty and pinned ones
// stay, and what was changed is never read back old.
func TestCacheIsBounded(t *testing.T) {
	const blocks = 2000
	dev := &memory{data: make([]byte, blocks*1024)}
	c := newBufferCache(dev, 1024, 100*1024)
	for blk := range uint64(200) { // more pinned ones than the limit
		_, err := c.readPinned(blk)
		must(t, err)
	}
	for blk := uint64(200); blk < 500; blk++ {
		b, err := c.write(blk)
		must(t, err)
		b.data[0] = byte(blk)
	}
	for blk := uint64(500); blk < blocks; blk++ {
		_, err := c.read(blk)
		must(t, err)
	}
	if n := len(c.blocks); n < 500 || n > 500+200 {
		t.Errorf("%d buffers are kept", n)
	}
	must(t, c.flush())
	for blk := uint64(500); blk < blocks; blk++ {
		_, err := c.read(blk)
		must(t, err)
	}
	if n := len(c.blocks); n > 200+200 {
		t.Errorf("%d buffers are kept after flush", n)
	}
	for blk := uint64(200); blk < 500; blk++ {
		b, err := c.read(blk)
		must(t, err)
		if b.data[0] != byte(blk) {
			t.Fatalf("block %d is old", blk)
		}
	}
	c.forget(300)
	if b, err := c.write(300); err != nil || b.data[0] != byte(300%256) {
		t.Errorf("forgotten block: %v", err)
	}
}
