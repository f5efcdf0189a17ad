// Package decoded keeps messages of rows decoded in memory, by the state of the row.
//
// It decides which message is kept, for how long, and when a row is another one than the row that was read before. It
// reads no row itself, and knows no table.
//
// Guarantees: a message is that of the row's state that its key names; the bodies of the messages that are kept have no
// more than some 4 MiB for each Messages. Safe for concurrent use.
package decoded

import (
	"errors"
	"sync"
	"time"
)

const (
	most    = 2 << 20     // bytes of bodies whose messages one generation keeps at most
	longest = time.Minute // how long a generation is the young one at most
)

// ErrChanged is the error for a row that changed between the statement that named it and the one that read it.
var ErrChanged = errors.New("a row has changed while it was read")

// Key names one state of a row of a table. A row that is written anew has another Xmin, whatever its version: a rebuild
// of the projection makes rows of the same version, and their bodies may differ. The version distinguishes the rows
// that a restored database would write under the transaction ids of the one before.
type Key struct {
	ID      [16]byte
	Node    [16]byte // of an observation: its key is the workspace and the node
	Version int64
	Xmin    uint32
}

// Messages keeps messages by the state of the row that they were decoded from: most rows of a list have not changed
// since they were listed last, and reading and decoding them costs more than the rest of a request. There are two
// generations: when the young one is full or a minute old, it becomes the old one. A message of the old one that a list
// needs moves to the young one; a message that no list needs is dropped after two minutes in which lists are read. The
// zero value keeps none yet.
type Messages[M any] struct {
	mu         sync.Mutex
	young, old map[Key]sized[M]
	bytes      int       // of the bodies in the young generation
	since      time.Time // when the young generation began
}

type sized[M any] struct {
	message M
	bytes   int
}

// Missing is a row whose message is not kept, and the place to store the message.
type Missing[M any] struct {
	Key Key
	to  *M
}

// Find stores the message of a row in *to. The message is shared between requests, so callers must not change it. If it
// is not kept, Find adds the row to missing. It reports whether the message was found.
func (d *Messages[M]) Find(key Key, to *M, missing *[]Missing[M]) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if time.Since(d.since) >= longest {
		d.rotate()
	}
	found, ok := d.young[key]
	if !ok {
		if found, ok = d.old[key]; ok {
			d.keep(key, found)
		}
	}
	if ok {
		*to = found.message
		return true
	}
	*missing = append(*missing, Missing[M]{key, to})
	return false
}

// Fill decodes the bodies that were read, keeps the messages and stores them where they are missing. It returns
// ErrChanged if a row that is missing was not read.
func (d *Messages[M]) Fill(missing []Missing[M], read map[Key][]byte, decode func([]byte) (M, error)) error {
	for _, part := range missing {
		body, ok := read[part.Key]
		if !ok {
			return ErrChanged
		}
		m, err := decode(body)
		if err != nil {
			return err
		}
		*part.to = m
		d.mu.Lock()
		d.keep(part.Key, sized[M]{m, len(body)})
		d.mu.Unlock()
	}
	return nil
}

// keep stores the message of a row in the young generation. The caller holds mu.
func (d *Messages[M]) keep(key Key, m sized[M]) {
	if d.bytes+m.bytes > most || d.young == nil {
		d.rotate()
	}
	d.young[key] = m
	d.bytes += m.bytes
}

// rotate makes the young generation the old one and begins a new one. The caller holds mu.
func (d *Messages[M]) rotate() {
	d.young, d.old, d.bytes, d.since = map[Key]sized[M]{}, d.young, 0, time.Now()
}
