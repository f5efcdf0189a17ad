// Package journald writes entries to the journal of systemd, by its native protocol over a datagram socket.
//
// A host without a journal costs one failed call and is no error. Write never blocks: an entry for which the journal
// has no room is dropped, since the diagnostic record on the disk has it.
package journald

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// Socket is where the journal of a host listens.
const Socket = "/run/systemd/journal/socket"

// maxEntry bounds an entry: a larger one would need a file of its own, which is passed over the socket.
const maxEntry = 16 << 10

// Priority is a level of syslog.
type Priority byte

// The levels that agents use.
const (
	Warning Priority = 4
	Info    Priority = 6
)

// Field is one field of an entry. Its name has capital letters, digits and underscores.
type Field struct{ Name, Value string }

// Write sends one entry to the journal at a socket. It returns nil if the path is empty, no journal listens there, or
// the journal has no room for the entry.
func Write(socket string, priority Priority, message string, fields ...Field) error {
	if socket == "" {
		return nil
	}
	entry := encode(append([]Field{
		{"MESSAGE", message},
		{"PRIORITY", string('0' + rune(priority))},
		{"SYSLOG_IDENTIFIER", "gpuaas-node-agent"},
	}, fields...))
	if len(entry) > maxEntry {
		return nil
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("write to journal: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	err = unix.Sendto(fd, entry, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, &unix.SockaddrUnix{Name: socket})
	for _, none := range []error{
		unix.ENOENT, unix.ENOTDIR, unix.ECONNREFUSED, unix.EACCES, unix.EPERM, unix.EAGAIN, unix.ENOBUFS, unix.EMSGSIZE,
		unix.EPROTOTYPE,
	} {
		if errors.Is(err, none) {
			return nil
		}
	}
	if err != nil {
		return fmt.Errorf("write to journal: %w", err)
	}
	return nil
}

// encode returns the fields as the journal reads them: a value of several lines has its length before it.
func encode(fields []Field) []byte {
	var out []byte
	for _, f := range fields {
		if f.Value == "" {
			continue
		}
		out = append(out, f.Name...)
		if strings.IndexByte(f.Value, '\n') >= 0 {
			out = append(out, '\n')
			out = binary.LittleEndian.AppendUint64(out, uint64(len(f.Value)))
		} else {
			out = append(out, '=')
		}
		out = append(append(out, f.Value...), '\n')
	}
	return out
}
