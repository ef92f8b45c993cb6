package seam

import (
	"bytes"
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	_ "unsafe" // for go:linkname

	"gvisor.dev/gvisor/pkg/seccomp"
	"gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"
	"gvisor.dev/gvisor/pkg/sentry/kernel"
	"gvisor.dev/gvisor/runsc/boot/filter"
	filterconfig "gvisor.dev/gvisor/runsc/boot/filter/config"
	"gvisor.dev/gvisor/runsc/config"
)

// precompiledPrograms is the table that filter.Install looks programs up in, by filter options. The module ships it empty.
//
//go:linkname precompiledPrograms gvisor.dev/gvisor/runsc/boot/filter.precompiledPrograms
var precompiledPrograms map[string]precompiledseccomp.Program

// filterRules computes the rules with stand-ins for what is known only at run time (pid, controller fd).
//
//go:linkname filterRules gvisor.dev/gvisor/runsc/boot/filter/config.rules
func filterRules(opt filter.Options, vars precompiledseccomp.Values) (seccomp.SyscallRules, seccomp.SyscallRules)

// checkPrecompiled verifies that the table behind the linkname is the one that filter's exported functions read.
// (A symbol that no longer exists fails at link time already.)
func checkPrecompiled() error {
	filter.ListPrecompiled() // runs the once that would replace the map
	if precompiledPrograms == nil {
		return fmt.Errorf("%w: runsc/boot/filter.precompiledPrograms is not filled by ListPrecompiled", ErrLayout)
	}
	const probe = "gvx probe"
	precompiledPrograms[probe] = precompiledseccomp.Program{Name: probe}
	defer delete(precompiledPrograms, probe)
	if p, ok := filter.GetPrecompiled(probe); !ok || p.Name != probe {
		return fmt.Errorf("%w: runsc/boot/filter.GetPrecompiled does not read precompiledPrograms", ErrLayout)
	}
	return nil
}

// UsePrecompiledSeccomp makes the Sentry load its seccomp filter from a cache in the directory dir, instead of compiling it
// (25 ms of a start). On a miss it compiles, stores and uses the program. Call it between boot.New and Loader.Run, while
// files may still be opened. hit tells whether the cache had it.
//
// An entry is named by the binary's Go build ID and the filter's options: one made by another binary or for other options
// is never found. An entry that others could have written, or that does not decode, is not used. A failure to store is
// returned beside a working filter: warn and go on. Where conf differs from what the loader uses, gVisor just does not find the
// program and compiles its own.
func UsePrecompiledSeccomp(k *kernel.Kernel, conf *config.Config, dir string) (hit bool, err error) {
	if conf.NVProxy || conf.TPUProxy || conf.Network == config.NetworkHost {
		return false, nil // not options of ours
	}
	opt := filter.Options{
		Platform:       k.Platform.SeccompInfo(),
		HostFilesystem: conf.DirectFS,
		ProfileEnable:  conf.ProfileEnable,
		CgoEnabled:     config.CgoEnabled,
		PluginNetwork:  conf.Network == config.NetworkPlugin,
	}
	id, err := buildID()
	if err != nil {
		return false, err
	}
	vars := slices.Sorted(maps.Keys(opt.Vars()))
	sum := sha256.Sum256(fmt.Append(nil, id, "\x00", opt.ConfigKey(), "\x00", vars))
	name := filepath.Join(dir, "seccomp-"+hex.EncodeToString(sum[:16])+".json")
	p, err := readProgram(name, opt.ConfigKey(), vars)
	if err == nil {
		install(p)
		return true, nil
	}
	p, err = precompiledseccomp.Precompile(opt.ConfigKey(), vars, func(v precompiledseccomp.Values) *seccomp.Program {
		rules, denied := filterRules(opt, v)
		return &seccomp.Program{
			RuleSets: []seccomp.RuleSet{{Rules: denied.Copy()}, {Rules: rules.Copy(), Action: seccomp.Allow}},
			Options:  filterconfig.SeccompOptions(opt),
		}
	})
	if err != nil {
		return false, fmt.Errorf("precompiling the seccomp filter: %w", err)
	}
	install(p)
	return false, writeProgram(name, p)
}

func install(p precompiledseccomp.Program) {
	filter.ListPrecompiled() // runs the once that would replace the map
	precompiledPrograms[p.Name] = p
}

// readProgram reads a cached program and refuses one that is not for these options and variables, or not ours.
func readProgram(name, key string, vars []string) (p precompiledseccomp.Program, err error) {
	st, err := os.Lstat(name)
	if err != nil {
		return p, err
	}
	if !st.Mode().IsRegular() || st.Mode().Perm()&0o022 != 0 || !ownedByUs(st) {
		return p, fmt.Errorf("%s: not a private file of this user", name)
	}
	b, err := os.ReadFile(name)
	if err != nil {
		return p, err
	}
	if err := json.Unmarshal(b, &p); err != nil {
		return p, fmt.Errorf("%s: %w", name, err)
	}
	if p.Name != key || len(p.Bytecode32) == 0 || len(p.Bytecode32)%2 != 0 || !slices.Equal(slices.Sorted(maps.Keys(p.VarOffsets)), vars) {
		return p, fmt.Errorf("%s: not a program for these options", name)
	}
	for _, offsets := range p.VarOffsets {
		for _, o := range offsets {
			if o < 0 || o >= len(p.Bytecode32) {
				return p, fmt.Errorf("%s: a variable lies outside of the program", name)
			}
		}
	}
	return p, nil
}

// writeProgram stores p under name; concurrent writers write the same bytes, the last rename wins.
func writeProgram(name string, p precompiledseccomp.Program) error {
	b, err := json.Marshal(p)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(name), ".seccomp-*")
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		err = errors.Join(err, removeIfThere(f.Name()))
	}
	return err
}

func removeIfThere(name string) error {
	if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// buildID returns the Go build ID of the running binary, which names its exact contents.
func buildID() (string, error) {
	f, err := elf.Open("/proc/self/exe")
	if err != nil {
		return "", fmt.Errorf("reading the build ID: %w", err)
	}
	defer f.Close()
	s := f.Section(".note.go.buildid")
	if s == nil {
		return "", errors.New("the binary has no Go build ID")
	}
	b, err := s.Data()
	if err != nil {
		return "", fmt.Errorf("reading the build ID: %w", err)
	}
	// An ELF note: sizes of name and contents, type, name "Go\0\0", contents.
	const header = 16
	if len(b) <= header || !bytes.Equal(b[12:16], []byte("Go\x00\x00")) {
		return "", errors.New("the binary's Go build ID is empty or malformed")
	}
	return string(b[header:]), nil
}
