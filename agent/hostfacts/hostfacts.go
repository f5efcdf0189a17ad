// Package hostfacts collects the facts that an agent reports of its host: kernel, processors, memory, disks, addresses,
// container runtime and GPUs.
//
// It believes the kernel's files and the GPU driver's. To the control plane the facts are untrusted evidence: they help
// to explain, and never decide identity. It never fails: a fact that cannot be read is left empty, and GPUs that were
// declared by a flag are marked as simulated.
//
// Guarantees: Collect takes at most a few seconds; Changed ignores values that change all the time, such as free space.
package hostfacts

import (
	"cmp"
	"context"
	"encoding/hex"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
)

// Config sets where facts are read and which devices are declared.
type Config struct {
	// Root is before every path that is read, those of Paths apart; empty on a real host. Below a root the driver's tool
	// is run only if SMI names it, and simulated devices have the version of the root's driver.
	Root string
	// Paths are the directories whose file systems workspaces use.
	Paths []string
	// SimulatedGPUs declares that many devices, marked as simulated, instead of scanning for real ones. Zero scans.
	SimulatedGPUs int
	// SMI is the driver's tool, which is run for what the driver's files lack; empty means `nvidia-smi` in PATH, and `-`
	// that no tool is run.
	SMI string
}

const maxAddresses = 64

// Collect returns the facts of the host. A fact that cannot be read is left empty.
func Collect(ctx context.Context, cfg Config) *commonv1.HostFacts {
	host := cfg.line("proc/sys/kernel/hostname")
	if host == "" {
		host, _ = os.Hostname() // empty if it cannot be read
	}
	return &commonv1.HostFacts{
		Hostname:    host,
		Kernel:      cfg.line("proc/sys/kernel/osrelease"),
		Os:          cfg.osName(),
		Arch:        runtime.GOARCH,
		Cpus:        int32(runtime.NumCPU()), // a number of processors
		MemoryBytes: cfg.memory(),
		Disks:       cfg.disks(),
		Gpus:        cfg.gpus(ctx),
		Addresses:   cfg.addresses(),
		MachineId:   cfg.line("etc/machine-id"),
		Root:        os.Getuid() == 0,

		ContainerRuntime: cfg.containerRuntime(),
	}
}

// BootID returns an id that changes with each boot of the host; empty if it cannot be read.
func BootID(cfg Config) string { return cfg.line("proc/sys/kernel/random/boot_id") }

// Changed reports whether b is to be sent to a control plane that has a. A change of free space alone is not.
func Changed(a, b *commonv1.HostFacts) bool {
	if a == nil || b == nil {
		return a != b
	}
	return !proto.Equal(withoutFreeSpace(a), withoutFreeSpace(b))
}

func withoutFreeSpace(f *commonv1.HostFacts) *commonv1.HostFacts {
	out := proto.CloneOf(f)
	for _, d := range out.GetDisks() {
		d.FreeBytes = 0
	}
	if disk := out.GetStateDisk(); disk != nil {
		disk.FreeBytes, disk.Detail = 0, ""
	}
	return out
}

func (c Config) path(rel string) string { return filepath.Join("/", c.Root, rel) }

func (c Config) line(rel string) string {
	data, err := os.ReadFile(c.path(rel))
	if err != nil {
		return ""
	}
	first, _, _ := strings.Cut(string(data), "\n")
	return clean(first)
}

// value returns what follows a prefix in the first line of a file that has it; empty if none has.
func (c Config) value(rel, prefix string) string {
	data, err := os.ReadFile(c.path(rel))
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, prefix); ok {
			return strings.TrimSpace(rest)
		}
	}
	return ""
}

func (c Config) osName() string {
	return cmp.Or(clean(strings.Trim(c.value("etc/os-release", "PRETTY_NAME="), `"'`)), runtime.GOOS)
}

func (c Config) memory() int64 {
	kib, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(c.value("proc/meminfo", "MemTotal:"), "kB")), 10, 64)
	if err != nil {
		return 0
	}
	return kib << 10
}

func (c Config) disks() []*commonv1.Disk {
	var out []*commonv1.Disk
	for _, p := range c.Paths {
		var st unix.Statfs_t
		if unix.Statfs(p, &st) != nil {
			continue
		}
		size := uint64(st.Bsize) // a block's size is positive
		out = append(out, &commonv1.Disk{
			Path: p, FsType: c.fsType(p), SizeBytes: int64(st.Blocks * size), FreeBytes: int64(st.Bavail * size),
		})
	}
	return out
}

// fsType returns the type of the mount with the longest prefix of p.
func (c Config) fsType(p string) string {
	data, err := os.ReadFile(c.path("proc/self/mounts"))
	if err != nil {
		return ""
	}
	best, kind := -1, ""
	for line := range strings.Lines(string(data)) {
		f := strings.Fields(line)
		if len(f) < 3 {
			continue
		}
		if rel, err := filepath.Rel(f[1], p); err == nil && rel != ".." && !strings.HasPrefix(rel, "../") &&
			len(f[1]) >= best {
			best, kind = len(f[1]), f[2]
		}
	}
	return kind
}

// addresses returns the IP addresses of the host's interfaces, without loopback and link-local ones, sorted, at most
// maxAddresses.
func (c Config) addresses() []string {
	var out []string
	for _, ip := range c.addressList() {
		if !ip.IsLoopback() && !ip.IsLinkLocalUnicast() {
			out = append(out, ip.String())
		}
	}
	slices.Sort(out)
	out = slices.Compact(out)
	return out[:min(len(out), maxAddresses)]
}

// addressList returns the addresses of all interfaces. Below a root that has the kernel's table of routes it returns
// the IPv4 addresses that the table has as the host's own, and the IPv6 addresses of the kernel's list, if it has one.
func (c Config) addressList() []net.IP {
	var out []net.IP
	if c.Root != "" {
		if data, err := os.ReadFile(c.path("proc/net/fib_trie")); err == nil {
			six, _ := os.ReadFile(c.path("proc/net/if_inet6")) // a host without IPv6 has none
			return append(ownAddresses(string(data)), ownAddresses6(string(six))...)
		}
	}
	list, err := net.InterfaceAddrs()
	if err != nil {
		return nil
	}
	for _, a := range list {
		if n, ok := a.(*net.IPNet); ok {
			out = append(out, n.IP)
		}
	}
	return out
}

// ownAddresses returns the addresses of a fib_trie file that are followed by a line `/32 host LOCAL`.
func ownAddresses(trie string) []net.IP {
	var out []net.IP
	var last net.IP
	for line := range strings.Lines(trie) {
		f := strings.Fields(line)
		switch {
		case len(f) >= 2 && f[0] == "|--":
			last = net.ParseIP(f[1])
		case len(f) >= 3 && f[0] == "/32" && f[1] == "host" && f[2] == "LOCAL" && last != nil:
			out = append(out, last)
			last = nil
		}
	}
	return out
}

// ownAddresses6 returns the addresses of an if_inet6 file, whose lines begin with one in hexadecimal.
func ownAddresses6(list string) []net.IP {
	var out []net.IP
	for line := range strings.Lines(list) {
		text, _, _ := strings.Cut(line, " ")
		if address, err := hex.DecodeString(text); err == nil && len(address) == net.IPv6len {
			out = append(out, address)
		}
	}
	return out
}

// clean returns a value of a driver or a file without unprintable characters, cut to 256 bytes.
func clean(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == '\uFFFD' {
			return -1
		}
		return r
	}, strings.ToValidUTF8(s, ""))
	if len(s) > 256 {
		s = strings.ToValidUTF8(s[:256], "")
	}
	return strings.TrimSpace(s)
}
