package sandbox

import (
	"fmt"

	"gvx.dev/gvx/native/internal/blockdev"
	"gvx.dev/gvx/native/internal/ext4"
	"gvx.dev/gvx/native/internal/seam"
	"gvx.dev/gvx/native/internal/sentryfs"
)

// openVolumes registers the ext4 file system type and opens every volume, while descriptors may still be examined: the
// seccomp filter that Run installs allows little but reading and writing them.
func (s *sentry) openVolumes() error {
	s.opened = make([]*sentryfs.Volume, len(s.cfg.Episode.Mounts))
	if err := seam.EnableFallocateModes(); err != nil {
		return err
	}
	if err := seam.RegisterFilesystem(s.kernel.VFS(), sentryfs.Name, &sentryfs.FilesystemType{}); err != nil {
		return err
	}
	for i, m := range s.cfg.Episode.Mounts {
		if m.Kind != MountVolume {
			continue
		}
		v, err := openVolume(s.cfg.VolumeFDs[i], s.cfg.BaseFDs[i], m)
		if err != nil {
			return &failure{KindVolume, fmt.Errorf("the volume for %s: %w", m.Destination, err)}
		}
		sentryfs.RegisterVolume(v)
		s.opened[i] = v
		s.mu.Lock()
		s.volumes = append(s.volumes, volume{m.Destination, v.Close})
		s.mu.Unlock()
	}
	return nil
}

// openVolume opens the ext4 file system on a descriptor. The image says that its journal must be replayed from here until it is closed.
func openVolume(fd, base int, m Mount) (*sentryfs.Volume, error) {
	dev, err := openDevice(fd, base, m)
	if err != nil {
		return nil, err
	}
	v := &sentryfs.Volume{Key: m.Destination, Dev: dev}
	if v.FS, err = ext4.Open(dev, ext4.Options{ReadOnly: m.ReadOnly, Durable: m.Durability == DurabilityHost}); err != nil {
		return nil, err
	}
	return v, nil
}

// openDevice opens what lies below a volume: the image, or a delta and its backing file.
func openDevice(fd, base int, m Mount) (blockdev.Device, error) {
	if base >= 0 {
		// Without flushes, what was written must outlive this process as it is.
		return blockdev.NewDelta(fd, base, blockdev.DeltaOptions{ReadOnly: m.ReadOnly, Eager: m.Durability != DurabilityHost})
	}
	if delta, err := blockdev.IsDelta(fd); err != nil {
		return nil, err
	} else if delta {
		return nil, fmt.Errorf("the image is a delta, and no backing file was given: %w", blockdev.ErrBacking)
	}
	return blockdev.NewFile(fd, m.ReadOnly)
}

// mountVolume mounts an opened volume at its destination.
func (s *sentry) mountVolume(g *guestFiles, i int) error {
	m := s.cfg.Episode.Mounts[i]
	return seam.MountVolume(g.ctx, s.kernel, seam.Mount{
		Type: sentryfs.Name, Source: fmt.Sprintf("/dev/gvx/%d", i), Path: m.Destination, ReadOnly: m.ReadOnly, Data: s.opened[i],
	})
}
