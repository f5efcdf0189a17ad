package host

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// established is the state of a TCP connection in the kernel's table.
const established = "01"

// Connections returns how many established TCP connections a process has to a host:port of IPv4, by the kernel's table.
// A process that has ended has none.
func Connections(pid int, addr string) (int, error) {
	remote, err := tableAddress(addr)
	if err != nil {
		return 0, err
	}
	proc := filepath.Join("/proc", strconv.Itoa(pid))
	table, err := os.ReadFile(filepath.Join(proc, "net", "tcp"))
	if err != nil {
		return 0, nil //nolint:nilerr // it has ended
	}
	inodes := map[string]bool{}
	for line := range strings.Lines(string(table)) {
		const remoteAt, stateAt, inodeAt = 2, 3, 9
		fields := strings.Fields(line)
		if len(fields) > inodeAt && fields[remoteAt] == remote && fields[stateAt] == established {
			inodes["socket:["+fields[inodeAt]+"]"] = true
		}
	}
	files, err := filepath.Glob(filepath.Join(proc, "fd", "*"))
	if err != nil {
		return 0, err
	}
	count := 0
	for _, file := range files {
		if target, err := os.Readlink(file); err == nil && inodes[target] { // else it was closed meanwhile
			count++
		}
	}
	return count, nil
}

// tableAddress spells an address as the kernel's table does on a little-endian host.
func tableAddress(addr string) (string, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return "", err
	}
	ip := net.ParseIP(host).To4()
	number, err := strconv.ParseUint(port, 10, 16)
	if ip == nil || err != nil {
		return "", fmt.Errorf("%s is no address of IPv4", addr)
	}
	return fmt.Sprintf("%02X%02X%02X%02X:%04X", ip[3], ip[2], ip[1], ip[0], number), nil
}
