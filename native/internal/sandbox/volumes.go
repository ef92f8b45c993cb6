package sandbox

import "errors"

// openVolumes registers the ext4 file system type and opens every volume's image, while descriptors may still be examined.
func (s *sentry) openVolumes() error {
	for _, m := range s.cfg.Episode.Mounts {
		if m.Kind == MountVolume {
			return errors.New("volumes need the ext4 driver, which is not linked in")
		}
	}
	return nil
}

func (s *sentry) mountVolume(*guestFiles, int) error { return nil }
