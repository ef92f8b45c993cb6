package ext4

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"gvx.dev/gvx/native/internal/blockdev"
)

// TestFreedSpaceIsUsedAgainWhenItIsNeeded: blocks that a transaction has freed wait for its commit; whoever finds no
// others makes it happen. Files, directories, attributes and mappings, each on a full volume.
func TestFreedSpaceIsUsedAgainWhenItIsNeeded(t *testing.T) {
	for _, args := range [][]string{{"-O", profile, "-m", "0"}, {"-O", "^has_journal", "-m", "0"}} {
		img := mkfs(t, 32<<20, args...)
		fs := open(t, img, Options{CommitInterval: time.Hour})
		chunk := make([]byte, 1<<20)
		fill := func(name string) (n int64) {
			f, err := fs.Root().Create(name, New{})
			must(t, err)
			defer f.DecRef()
			for {
				m, err := f.WriteAt(chunk, n)
				n += int64(m)
				if errors.Is(err, syscall.ENOSPC) {
					return n
				}
				must(t, err)
			}
		}
		first := fill("a")
		for round := range 3 {
			must(t, fs.Root().Unlink("a"))
			if n := fill("a"); n < first-8192 {
				t.Fatalf("round %d: %d bytes fit, %d did before", round, n, first)
			}
		}
		i, err := lookup(fs, "a")
		must(t, err)
		must(t, i.Truncate(first/2))
		_, err = i.Extents(first/2, 4<<20, true)
		must(t, err)
		must(t, i.SetSize(first/2+4<<20))
		fill("b")
		must(t, i.Truncate(0))
		mkdir(t, fs.Root(), "dir").DecRef()
		must(t, i.SetXattr("user.large", make([]byte, 700), 0))
		must(t, i.Fallocate(0, 0, 2<<20))
		i.DecRef()
		finish(t, fs, img)
	}
}

// failing is a device whose writes and flushes fail from some moment on.
type failing struct {
	blockdev.Device
	left atomic.Int64 // operations until then
	err  error
}

func (f *failing) WriteAt(p []byte, off int64) (int, error) {
	if f.left.Add(-1) < 0 {
		return 0, f.err
	}
	return f.Device.WriteAt(p, off)
}

func (f *failing) Flush() error {
	if f.left.Add(-1) < 0 {
		return f.err
	}
	return f.Device.Flush()
}

// TestAFailingDevice: after the journal could not be written no sync succeeds, nothing is changed any more, what is
// there can be read, and what was synced before survives.
func TestAFailingDevice(t *testing.T) {
	for _, durable := range []bool{false, true} {
		for after := range int64(40) {
			img := mkfsProfile(t, 16<<20, "-J", "size=4")
			dev := &failing{Device: device(t, img, false), err: fmt.Errorf("a test: %w", syscall.EIO)}
			dev.left.Store(1 << 40)
			fs, err := Open(dev, Options{Durable: durable, CommitInterval: time.Hour})
			must(t, err)
			mkfile(t, fs.Root(), "before", []byte("synced")).DecRef()
			must(t, fs.Sync())
			dev.left.Store(after)
			var synced []string
			failed := false
			for n := 0; !failed; n++ {
				name := fmt.Sprint(n)
				f, err := fs.Root().Create(name, New{})
				if err == nil {
					_, err = f.WriteAt([]byte(name), 0)
					if serr := f.Sync(n%2 == 0); err == nil {
						err = serr
					}
					f.DecRef()
				}
				if err == nil {
					synced = append(synced, name)
				}
				failed = fs.failed() != nil
				if !failed && err != nil && !errors.Is(err, syscall.EIO) {
					t.Fatalf("after %d: %v", after, err)
				}
			}
			if err := fs.Sync(); err == nil {
				t.Errorf("after %d: sync succeeds", after)
			}
			if i, err := lookup(fs, "before"); err != nil || i.Sync(true) == nil {
				t.Errorf("after %d: a file of before: %v, or its sync succeeds", after, err)
			} else {
				i.DecRef()
			}
			if _, err := fs.Root().Create("late", New{}); !errors.Is(err, syscall.EROFS) {
				t.Errorf("after %d: create: %v, want EROFS", after, err)
			}
			if err := fs.Close(); err == nil {
				t.Errorf("after %d: close succeeds", after)
			}
			if out, err := exec.Command("e2fsck", "-fy", img).CombinedOutput(); err != nil && !strings.Contains(err.Error(), "status 1") {
				t.Fatalf("after %d: %v\n%s", after, err, out)
			}
			fsck(t, img)
			fs = open(t, img, Options{ReadOnly: true})
			for _, name := range append(synced, "before") {
				want := []byte(name)
				if name == "before" {
					want = []byte("synced")
				}
				i, err := lookup(fs, name)
				must(t, err)
				if got, err := contents(i); err != nil || !bytes.Equal(got, want) {
					t.Errorf("after %d: %s has %q, %v", after, name, got, err)
				}
				i.DecRef()
			}
		}
	}
}

// TestTruncationOverManyTransactions: a file of thousands of extents, in a volume whose journal holds a few hundred
// blocks, is cut, punched and deleted in steps, each of them a whole transaction's business.
func TestTruncationOverManyTransactions(t *testing.T) {
	img := mkfs(t, 96<<20, "-b", "1024", "-g", "256", "-N", "512", "-J", "size=1", "-O", "^resize_inode")
	fs := open(t, img, Options{})
	free := fs.Statfs().Free
	make1 := func(name string) *Inode {
		f := mkfile(t, fs.Root(), name, nil)
		for n := range int64(6000) {
			_, err := f.WriteAt([]byte{byte(n)}, n*8192) // many groups
			must(t, err)
		}
		return f
	}
	f := make1("f")
	must(t, f.Fallocate(FallocPunchHole|FallocKeepSize, 1<<20, 20<<20))
	must(t, f.Truncate(5000))
	if fs.orphans != nil {
		t.Error("the file is still in the orphan list")
	}
	must(t, f.Truncate(40<<20))
	got, err := contents(f)
	must(t, err)
	if len(got) != 40<<20 || bytes.Count(got, []byte{0}) != len(got) {
		t.Error("what was cut off is still there")
	}
	must(t, fs.Root().Unlink("f"))
	f.DecRef()
	make1("g").DecRef()
	must(t, fs.Root().Unlink("g"))
	must(t, fs.Sync())
	if s := fs.journal.Stats(); s.Commits < 4 || s.Overruns != 0 {
		t.Errorf("%+v", s)
	}
	if now := fs.Statfs().Free; now+8 < free {
		t.Errorf("%d blocks were free, %d are", free, now)
	}
	finish(t, fs, img)
}

// TestOpenRefusesWhatNeedsRecovery says so by name, whatever is set.
func TestOpenRefusesWhatNeedsRecovery(t *testing.T) {
	img := mkfsProfile(t, 16<<20)
	fs := open(t, img, Options{})
	mkfile(t, fs.Root(), "f", []byte("x")).DecRef()
	must(t, fs.Sync())
	if _, err := Open(device(t, img, false), Options{}); !errors.Is(err, syscall.EUCLEAN) || !strings.Contains(err.Error(), "needs recovery") {
		t.Errorf("open beside: %v", err)
	}
	must(t, fs.Close())
	fsck(t, img)
	runTool(t, "debugfs", "-w", "-R", "ssv feature_incompat +needs_recovery", img)
	must(t, open(t, img, Options{ReadOnly: true}).Close())
}

// TestWhatACrashLeftBehindTheEnd: bytes that a mapping put behind the end of file do not show when the file grows, even
// if nobody could clear them.
func TestWhatACrashLeftBehindTheEnd(t *testing.T) {
	img := mkfsProfile(t, 16<<20)
	fs := open(t, img, Options{})
	f := mkfile(t, fs.Root(), "f", []byte("short"))
	ext, err := f.Extents(0, 4096, true)
	must(t, err)
	must(t, fs.Sync())
	_, err = fs.dev.WriteAt(bytes.Repeat([]byte("x"), 4000), ext[0].DevOff+50)
	must(t, err)
	crashed := img + ".crashed"
	copyFile(t, img, crashed)
	f.DecRef()
	finish(t, fs, img)
	runTool(t, "e2fsck", "-fp", crashed)
	for _, grow := range []func(f *Inode) error{
		func(f *Inode) error { return f.Truncate(4096) },
		func(f *Inode) error { _, err := f.WriteAt([]byte{0}, 4095); return err },
		func(f *Inode) error { return f.Fallocate(0, 0, 4096) },
	} {
		copyFile(t, crashed, img)
		fs := open(t, img, Options{})
		f, err := lookup(fs, "f")
		must(t, err)
		must(t, grow(f))
		got, err := contents(f)
		if want := append([]byte("short"), make([]byte, 4091)...); err != nil || !bytes.Equal(got, want) {
			t.Errorf("the file has %q…, %v", got[:100], err)
		}
		f.DecRef()
		finish(t, fs, img)
	}
}

// TestKilledWhileTruncating: between the steps of a truncation or deletion the orphan list has what recovery needs.
func TestKilledWhileTruncating(t *testing.T) {
	img := mkfs(t, 32<<20, "-b", "1024", "-g", "256", "-N", "256", "-J", "size=1", "-O", "^resize_inode")
	before := img + ".before"
	var trace bytes.Buffer
	dev := &recorder{Device: device(t, img, false), out: bufio.NewWriter(&trace)}
	var fs *FS
	steps := 0
	var err error
	fs, err = Open(dev, Options{CommitInterval: time.Hour, NoDiscard: true, BeforeFree: func(*Inode, int64, int64) {
		steps++
		must(t, fs.Sync()) // a commit between any two steps
	}})
	must(t, err)
	for _, name := range []string{"cut", "gone"} {
		f := mkfile(t, fs.Root(), name, nil)
		for n := range int64(2000) {
			_, err := f.WriteAt([]byte{1}, n*5*1024)
			must(t, err)
		}
		f.DecRef()
	}
	must(t, fs.Sync())
	copyFile(t, img, before)
	dev.mu.Lock()
	must(t, dev.out.Flush())
	trace.Reset()
	dev.mu.Unlock()
	f, err := lookup(fs, "cut")
	must(t, err)
	must(t, f.Truncate(100))
	f.DecRef()
	must(t, fs.Root().Unlink("gone"))
	must(t, fs.Sync())
	dev.mu.Lock()
	must(t, dev.out.Flush())
	events := bytes.Clone(trace.Bytes())
	dev.mu.Unlock()
	finish(t, fs, img)

	disk, err := os.ReadFile(before)
	must(t, err)
	orphans, cuts := 0, 0
	for at := 0; at < len(events); {
		kind, off, n := events[at], binary.LittleEndian.Uint64(events[at+1:]), int(binary.LittleEndian.Uint64(events[at+9:]))
		at += 17
		if kind != eventWrite {
			continue
		}
		copy(disk[off:], events[at:at+n])
		at += n
		if cuts++; cuts > 40 {
			break
		}
		must(t, os.WriteFile(before, disk, 0o600))
		out, err := exec.Command("e2fsck", "-fy", before).CombinedOutput()
		// e2fsck does not count what it frees of orphans into the superblock it has from the log.
		problems := bytes.Count(out, []byte("Fix? yes")) - bytes.Count(out, []byte("Free blocks count wrong (")) - bytes.Count(out, []byte("Free inodes count wrong ("))
		if err != nil && !strings.Contains(err.Error(), "status 1") || problems > 0 {
			t.Fatalf("killed at write %d: %v\n%s", cuts, err, out)
		}
		orphans += bytes.Count(out, []byte("orphaned inode"))
		fsck(t, before)
	}
	if steps < 4 || cuts < steps || orphans < steps-2 {
		t.Errorf("%d steps, %d cuts, %d orphans: the truncation was not interrupted", steps, cuts, orphans)
	}
}
