package cluster

import (
	"fmt"
	"io"
	"os"
	"strings"
)

// Tail returns the last lines of a log, for people. It reads only the end of a long log.
func Tail(file string, lines int) string {
	const most = 32 << 10
	f, err := os.Open(file) // a log that we have opened
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > most {
		if _, err := f.Seek(-most, io.SeekEnd); err != nil {
			return err.Error()
		}
	}
	text, err := io.ReadAll(f)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// Tails returns the last lines of the logs of all services and agents, each under a heading with the state of the
// process.
func (c *Cluster) Tails(lines int) string {
	var out strings.Builder
	for _, p := range c.Processes() {
		fmt.Fprintf(&out, "--- %s, pid %d, %d starts, ends: %s\n%s\n", p.Name, p.PID(), p.Starts(), p.ends(),
			Tail(p.log, lines))
	}
	for _, a := range c.Nodes {
		fmt.Fprintf(&out, "--- agent %s, pid %d\n%s\n", a.Name(), a.PID(), Tail(a.LogPath(), lines))
	}
	return out.String()
}

// ends describes the last ends of the process.
func (p *Process) ends() string {
	exits := p.Exits()
	var out []string
	for _, e := range exits[max(0, len(exits)-3):] {
		out = append(out, e.At.Format("15:04:05")+" "+e.Cause)
	}
	if len(out) == 0 {
		return "none"
	}
	return strings.Join(out, ", ")
}

// Broken returns an error that names a service that ends by itself again and again, with its log; nil if none does.
func (c *Cluster) Broken() error {
	for _, p := range c.Processes() {
		if err := p.Broken(); err != nil {
			return err
		}
	}
	return nil
}
