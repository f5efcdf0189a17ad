package hostfacts

import (
	"bufio"
	"debug/buildinfo"
	"io"
	"os"
	"strings"
)

// maxPackages is how much of the list of installed packages is read.
const maxPackages = 32 << 20

// runtimes are the programs that run containers, in the order in which they are reported, with the packages that have
// them and where they are installed otherwise.
var runtimes = []struct {
	name     string
	packages []string
	program  string
}{
	{"containerd", []string{"containerd.io", "containerd"}, "usr/local/bin/containerd"},
	{"docker", []string{"docker-ce", "docker.io"}, "usr/local/bin/dockerd"},
	{"cri-o", []string{"cri-o"}, "usr/local/bin/crio"},
	{"runc", []string{"runc"}, "usr/local/sbin/runc"},
}

// containerRuntime returns the programs that run containers with their versions, as `containerd 1.7.22-1, runc 1.1.14`;
// empty if there are none. The versions are those of the installed packages, else those that the programs were built
// as. No program is run.
func (c Config) containerRuntime() string {
	installed := c.installed()
	var out []string
	for _, r := range runtimes {
		version := ""
		for _, p := range r.packages {
			if version == "" {
				version = installed[p]
			}
		}
		if version == "" {
			version = builtAs(c.path(r.program))
		}
		if version != "" {
			out = append(out, r.name+" "+version)
		}
	}
	return clean(strings.Join(out, ", "))
}

// installed returns the versions of the installed packages of runtimes, as dpkg has them.
func (c Config) installed() map[string]string {
	f, err := os.Open(c.path("var/lib/dpkg/status"))
	if err != nil {
		return nil
	}
	defer func() { _ = f.Close() }() // it was only read
	wanted := map[string]bool{}
	for _, r := range runtimes {
		for _, p := range r.packages {
			wanted[p] = true
		}
	}
	out := map[string]string{}
	name, here := "", false
	lines := bufio.NewScanner(io.LimitReader(f, maxPackages))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		field, value, _ := strings.Cut(lines.Text(), ":")
		value = strings.TrimSpace(value)
		switch field {
		case "Package":
			name, here = value, false
		case "Status":
			here = strings.HasSuffix(value, " installed")
		case "Version":
			if here && wanted[name] {
				out[name] = clean(value)
			}
		}
	}
	return out
}

// builtAs returns the version of the module that a Go program was built from, else the revision; empty if there is
// none.
func builtAs(path string) string {
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return ""
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			return s.Value[:min(len(s.Value), 12)]
		}
	}
	return ""
}
