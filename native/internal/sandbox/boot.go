package sandbox

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/cpuid"
	"gvisor.dev/gvisor/pkg/log"
	"gvisor.dev/gvisor/pkg/sentry/kernel"
	"gvisor.dev/gvisor/pkg/sentry/platform"
	_ "gvisor.dev/gvisor/pkg/sentry/platform/systrap" // the platform
	"gvisor.dev/gvisor/pkg/tcpip/nftables"
	"gvisor.dev/gvisor/pkg/timing"
	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/flag"
	"gvisor.dev/gvisor/runsc/specutils"
	"gvisor.dev/gvisor/runsc/starttime"

	"gvx.dev/gvx/native/internal/control"
	"gvx.dev/gvx/native/internal/netnat"
	"gvx.dev/gvx/native/internal/seam"
	"gvx.dev/gvx/native/internal/sentryfs"
)

const (
	// bootConfigFD is where the boot process finds its configuration.
	bootConfigFD = 3
	// maxPassedFDs keeps the passed descriptors below those that gVisor uses for the guest's stdio (253 to 255).
	maxPassedFDs = 200
	// gcPercent is Go's default; collection is off until the guest runs.
	gcPercent = 100
	// defaultMemory is the guest's memory when the episode says nothing.
	defaultMemory = 4 << 30
)

// bootConfig is handed from the supervisor to the boot process. Descriptor numbers are the boot process's.
type bootConfig struct {
	Episode   *Episode `json:"episode"`
	ListenFD  int      `json:"listen_fd"`
	ClientFD  int      `json:"client_fd"`
	StatusFD  int      `json:"status_fd"`
	NetworkFD int      `json:"network_fd"` // -1: no network but loopback
	RootfsFD  int      `json:"rootfs_fd"`
	StdioFDs  [3]int   `json:"stdio_fds"`
	VolumeFDs []int    `json:"volume_fds"` // one a mount, -1 where it is no volume
	BaseFDs   []int    `json:"base_fds"`   // one a mount, -1 where it is no delta
	CacheDir  string   `json:"cache_dir"`  // "": none
	Debug     bool     `json:"debug"`
}

// sentry is the state of the boot process.
type sentry struct {
	cfg    bootConfig
	status *eventWriter
	kernel *kernel.Kernel

	// opened has the volumes by the number of their mount, nil where it is none.
	opened []*sentryfs.Volume

	mu      sync.Mutex
	volumes []volume // those to close, in the order of opening
}

// volume is an open file system that must be closed for its image to be marked clean.
type volume struct {
	destination string
	close       func() error
}

// Boot is the Sentry process: it builds the guest, runs it to its end and returns the process's exit code, which means nothing but
// "reported" (0) or "failed" (non-zero). The report goes to the status socket.
func Boot() int {
	s := &sentry{}
	if err := s.run(); err != nil {
		s.fail(err)
	}
	return 0
}

// fail reports an error and ends the process; mounted volumes are closed first.
func (s *sentry) fail(err error) {
	kind := KindStart
	if f, ok := err.(*failure); ok {
		kind = f.kind
	}
	if cerr := s.closeVolumes(); cerr != nil {
		err = fmt.Errorf("%w; %w", err, cerr)
	}
	fmt.Fprintln(os.Stderr, err)
	s.status.emit(Event{Event: EventError, Kind: kind, Message: err.Error()})
	os.Exit(1)
}

func (s *sentry) run() error {
	t0 := time.Now()
	cfgFile := os.NewFile(bootConfigFD, "config")
	if err := json.NewDecoder(cfgFile).Decode(&s.cfg); err != nil {
		return fmt.Errorf("boot: configuration: %w", err)
	}
	_ = cfgFile.Close()
	s.status = &eventWriter{f: os.NewFile(uintptr(s.cfg.StatusFD), "status")}
	// The name in ps and top; the executable's is "exe", since it was started through /proc/self/exe.
	_ = os.WriteFile("/proc/self/comm", []byte("gvx-boot"), 0)

	level := log.Warning
	if s.cfg.Debug {
		level = log.Debug
	}
	logTo(os.Stderr, level)
	if err := seam.Check(); err != nil {
		return err
	}
	// These open files at their first use, which is too late once the seccomp filter is there: the log's first line wants the time zone, a
	// checkpoint the start time.
	cpuid.Initialize()
	_, _ = time.Now().Zone()
	starttime.Get()
	conf, err := sentryConfig(s.cfg.Episode)
	if err != nil {
		return err
	}
	if conf.Nftables {
		nftables.EnableNFTables()
	}
	plat, err := platform.Lookup(conf.Platform)
	if err != nil {
		return err
	}
	dev, err := plat.OpenDevice("")
	if err != nil {
		return fmt.Errorf("platform %s: %w", conf.Platform, err)
	}
	e := s.cfg.Episode
	memory := e.Resources.MemoryBytes
	if memory == 0 {
		memory = defaultMemory
	}
	cpus := e.Resources.CPUs
	if cpus == 0 {
		cpus = runtime.NumCPU()
	}
	if err := s.installMounter(); err != nil {
		return err
	}
	l, err := boot.New(boot.Args{
		ID: e.ID, Spec: runtimeSpec(e), Conf: conf,
		ControllerFD: s.cfg.ListenFD, PinRingFD: -1, DevGoferFD: -1, ExecFD: -1, UserLogFD: -1, PodInitConfigFD: -1, RootfsUpperTarFD: -1,
		Device: dev, StdioFDs: s.cfg.StdioFDs[:],
		// An erofs image below a memory file system, served by this process: no gofer.
		GoferFDs:        []int{s.cfg.RootfsFD},
		GoferMountConfs: []specutils.GoferMountConf{{Lower: specutils.Erofs, Upper: specutils.MemoryOverlay}},
		NumCPU:          cpus, TotalMem: memory, TotalHostMem: memory,
		StartupTimer: timing.New("gvx", t0),
	})
	if err != nil {
		return fmt.Errorf("building the sandbox: %w", err)
	}
	if s.kernel, err = seam.KernelOf(l); err != nil {
		return err
	}
	if err := s.prepareKernel(); err != nil {
		return err
	}
	if s.cfg.CacheDir != "" {
		if _, err := seam.UsePrecompiledSeccomp(s.kernel, conf, s.cfg.CacheDir); err != nil {
			log.Warningf("the seccomp filter is compiled at each start: %v", err)
		}
	}
	client, err := control.NewClient(s.cfg.ClientFD)
	if err != nil {
		return err
	}
	go s.start(client)
	l.WaitForStartSignal()
	if err := l.Run(); err != nil {
		return err // Most likely too late: see start.
	}
	s.status.emit(Event{Event: EventStarted})
	debug.SetGCPercent(gcPercent)
	ws := l.WaitExit()
	// No guest task is left: nothing writes to the volumes any more. The loader is not destroyed, the process ends instead.
	if err := s.closeVolumes(); err != nil {
		return &failure{KindVolume, err}
	}
	exit := Event{Event: EventExit}
	code := int(ws.ExitStatus())
	if ws.Signaled() {
		sig := int(ws.TerminationSignal())
		exit.Signal = &sig
		code = 128 + sig
	}
	exit.Code = &code
	s.status.emit(exit)
	return nil
}

// start drives the loader through its own control server: that is the only way in which a root container is started. It
// ends the process on an error, since the loader's Run returns it two seconds later only, and not at all without a start.
func (s *sentry) start(client *control.Client) {
	err := client.SetNetwork(s.networkArgs())
	if err == nil {
		err = client.Start(s.cfg.Episode.ID)
	}
	if err != nil {
		s.fail(err)
	}
	_ = client.Close()
}

// networkArgs describes the guest's devices: lo always, eth0 where there is a network.
func (s *sentry) networkArgs() *boot.CreateLinksAndRoutesArgs {
	args := &boot.CreateLinksAndRoutesArgs{LoopbackLinks: []boot.LoopbackLink{boot.DefaultLoopbackLink}}
	if s.cfg.NetworkFD < 0 {
		return args
	}
	guest := net.IP(netnat.Guest.AsSlice())
	mask := net.CIDRMask(netnat.PrefixLen, 32)
	args.FDBasedLinks = []boot.FDBasedLink{{
		Name: "eth0", MTU: netnat.MTU, NumChannels: 1, LinkAddress: netnat.GuestMAC, QDisc: config.QDiscFIFO,
		Addresses: []boot.IPWithPrefix{{Address: guest, PrefixLen: netnat.PrefixLen}},
		Routes:    []boot.Route{{Destination: net.IPNet{IP: guest.Mask(mask), Mask: mask}}},
		// No RX or TX checksum offload: docker's NAT inside the guest forwards frames of other devices.
	}}
	args.Defaultv4Gateway = boot.DefaultRoute{Name: "eth0", Route: boot.Route{
		Destination: net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}, Gateway: net.IP(netnat.Gateway.AsSlice()),
	}}
	args.FilePayload.Files = []*os.File{os.NewFile(uintptr(s.cfg.NetworkFD), "network")}
	return args
}

// sentryConfig returns gVisor's configuration for an episode.
func sentryConfig(e *Episode) (*config.Config, error) {
	fs := flag.NewFlagSet("gvx", flag.ContinueOnError)
	config.RegisterFlags(fs)
	for _, f := range []struct{ name, value string }{
		{"platform", "systrap"},
		{"network", "sandbox"},
		{"rootless", "true"},        // we are nobody on the host
		{"ignore-cgroups", "true"},  // and have no cgroup of our own
		{"directfs", "false"},       // the Sentry opens no host files
		{"overlay2", "root:memory"}, // writes to / stay in memory
		{"net-raw", "true"},         // ping and tcpdump in the guest, whose network is its own
		{"allow-packet-socket-write", "true"},
		{"allow-suid", "true"}, // sudo in the guest; the host process has no_new_privs
		{"TESTONLY-nftables", "true"},
	} {
		if err := fs.Set(f.name, f.value); err != nil {
			return nil, fmt.Errorf("gVisor's flag %s: %w", f.name, err)
		}
	}
	return config.NewFromFlags(fs)
}

// closeVolumes closes every volume, last opened first, and returns the first error.
func (s *sentry) closeVolumes() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var first error
	for i := len(s.volumes) - 1; i >= 0; i-- {
		v := s.volumes[i]
		if err := v.close(); err != nil && first == nil {
			first = fmt.Errorf("closing the volume at %s: %w", v.destination, err)
		}
	}
	s.volumes = nil
	return first
}
