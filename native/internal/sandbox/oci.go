package sandbox

import (
	"strconv"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"gvisor.dev/gvisor/runsc/specutils"
)

const (
	// guestOpenFiles is the guest's RLIMIT_NOFILE, the value docker's containers commonly have. The guest's descriptors are
	// not the host's, so the host's limit does not matter.
	guestOpenFiles = 1 << 20
	// shmBytes is the size of /dev/shm, as docker's default.
	shmBytes = 64 << 20
)

// runtimeSpec makes the OCI document for an episode: a container as `docker run --privileged` makes it, alone in its
// machine. The episode's own mounts are not in it: they are made by mountAll, which knows volumes.
func runtimeSpec(e *Episode) *specs.Spec {
	// Only options that gVisor knows: it logs a warning for each other.
	nosuid := []string{"nosuid", "noexec"}
	return &specs.Spec{
		Version:  specs.Version,
		Hostname: e.Hostname,
		Root:     &specs.Root{Path: "/"},
		Process: &specs.Process{
			Args: e.Process.Args, Env: e.Process.Env, Cwd: e.Process.Cwd, Terminal: e.Process.Terminal,
			User:         specs.User{UID: e.Process.User.UID, GID: e.Process.User.GID, AdditionalGids: e.Process.User.AdditionalGIDs},
			Capabilities: capabilities(e),
			Rlimits: []specs.POSIXRlimit{
				{Type: "RLIMIT_NOFILE", Soft: guestOpenFiles, Hard: guestOpenFiles},
			},
		},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: nosuid},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid"}},
			{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec"}},
			{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: append([]string{"mode=1777", "size=" + strconv.Itoa(shmBytes)}, nosuid...)},
			{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: nosuid},
			{Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup", Options: nosuid},
		},
		Linux: &specs.Linux{},
	}
}

// capabilities returns all of them, in the sets that `docker run --privileged` fills: for a user other than root the
// effective and permitted sets are empty until it executes a set-user-ID program.
func capabilities(e *Episode) *specs.LinuxCapabilities {
	all := specutils.AllCapabilities()
	c := &specs.LinuxCapabilities{Bounding: all.Bounding}
	if e.Process.User.UID == 0 {
		c.Effective, c.Permitted = all.Effective, all.Permitted
	}
	return c
}
