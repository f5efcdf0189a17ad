package ledger

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/mesh/internal/pki"
)

const (
	// journalEnding is appended to the path of the ledger.
	journalEnding = ".journal"
	// journalSize is the length of the file, all of which is written when it is made: a record needs no new block, so that
	// it is one write and one sync, and is taken on a disk that is full.
	journalSize = 256 << 10
	// headerSize is the length of the header: the format, the ledger's id, the journal's id, and space for a later format.
	headerSize = 128
	// recordHead is the length of a payload, its checksum, and the record's number.
	recordHead = 4 + 4 + 8

	journalFormat = "gpuaas-ledger-journal-1\n"
	idLength      = 36 // of an id as text
)

var (
	errRecord  = errors.New("a record of the journal is not readable")
	castagnoli = crc32.MakeTable(crc32.Castagnoli)
)

// journal is a file of changes that are not yet in the tables. Records follow each other, each with a number that is
// one more than the number of the record before. They begin again at the front of the file once the tables have all of
// them: older records that remain behind them have lower numbers. As in the log of a database a record is written
// behind synced ones in the same page: a disk that loses these when its power fails in a write loses records.
type journal struct {
	file   *os.File
	id     string // the tables name it
	at     int64  // where the next record goes
	number uint64 // of the last record
	failed bool   // the last record may be in the file or not
}

// openJournal opens the journal with this id of a ledger whose tables lack the journal's changes. The error is
// ErrCorrupt if it is not there, or not whole.
func openJournal(path, ledgerID, id string) (*journal, error) {
	header, whole, err := readHeader(path)
	switch {
	case err == nil && whole && header == journalFormat+ledgerID+id:
		return openRecords(path, id)
	case err == nil || errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%w: its journal %s is not there, or not whole", ErrCorrupt, path)
	default:
		return nil, err
	}
}

// newJournal makes a journal for a ledger whose tables have everything, in place of an existing one. One of another
// ledger, whose file was moved away without it, is kept under a name with that ledger's id.
func newJournal(path, ledgerID string) (*journal, error) {
	// A crash, or a full disk, may have left an unfinished new file.
	if err := os.Remove(path + building); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("remove unfinished journal of task ledger: %w", err)
	}
	header, _, err := readHeader(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if owner := ownerOf(header); err == nil && owner != ledgerID {
		if err := os.Rename(path, fmt.Sprintf("%s.of-ledger-%s-%d", path, owner, time.Now().UnixNano())); err != nil {
			return nil, fmt.Errorf("move journal of another task ledger: %w", err)
		}
	}
	id, err := uuid.NewRandom()
	if err != nil {
		return nil, fmt.Errorf("draw id of journal: %w", err)
	}
	if err := createJournal(path, journalFormat+ledgerID+id.String()); err != nil {
		return nil, err
	}
	return openRecords(path, id.String())
}

func openRecords(path, id string) (*journal, error) {
	// Each write returns when it is on disk.
	file, err := os.OpenFile(path, os.O_RDWR|unix.O_DSYNC, 0) // the agent's own state directory
	if err != nil {
		return nil, fmt.Errorf("open journal of task ledger: %w", err)
	}
	return &journal{file: file, id: id, at: headerSize}, nil
}

// readHeader returns the header of the file, and whether the file has the length of a journal.
func readHeader(path string) (string, bool, error) {
	file, err := os.Open(path) // the agent's own state directory
	if err != nil {
		return "", false, fmt.Errorf("open journal of task ledger: %w", err)
	}
	header := make([]byte, len(journalFormat)+2*idLength)
	n, err := io.ReadFull(file, header)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = nil
	}
	info, statErr := file.Stat()
	if err := errors.Join(err, statErr, file.Close()); err != nil {
		return "", false, fmt.Errorf("read journal of task ledger: %w", err)
	}
	return string(header[:n]), info.Size() == journalSize, nil
}

// ownerOf returns the ledger's id in a header, as a part of a file's name.
func ownerOf(header string) string {
	id, ok := strings.CutPrefix(header, journalFormat)
	id = id[:min(len(id), idLength)]
	if _, err := uuid.Parse(id); !ok || err != nil {
		return "unknown"
	}
	return id
}

func createJournal(path, header string) error {
	data := make([]byte, journalSize)
	copy(data, header)
	// the agent's own state directory
	file, err := os.OpenFile(path+building, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("create journal of task ledger: %w", err)
	}
	_, err = file.Write(data)
	if err == nil {
		err = file.Sync()
	}
	if err := errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("write new journal of task ledger: %w", errors.Join(err, os.Remove(path+building)))
	}
	if err := os.Rename(path+building, path); err != nil {
		return fmt.Errorf("name new journal of task ledger: %w", err)
	}
	return pki.SyncDir(filepath.Dir(path))
}

// read returns the changes of the records that follow the one with the number applied, in their order, and sets the
// place of the next record behind them. A last record that is not whole was never reported as stored, and is left out.
// The error is ErrCorrupt if a record that is not whole has whole ones behind it.
func (j *journal) read(applied uint64) ([]change, error) {
	data := make([]byte, journalSize)
	if _, err := j.file.ReadAt(data, 0); err != nil {
		return nil, fmt.Errorf("read journal of task ledger: %w", err)
	}
	var changes []change
	at, last := headerSize, applied
	for {
		number, payload, size := j.record(data[at:])
		if size == 0 || number != last+1 {
			break
		}
		found, err := decodeChanges(payload)
		if err != nil {
			return nil, fmt.Errorf("read record %d of the journal of the task ledger: %w: %w", number, ErrCorrupt, err)
		}
		changes = append(changes, found...)
		at, last = at+size, number
	}
	for off := at; off+recordHead <= len(data); off += align {
		if number := binary.BigEndian.Uint64(data[off+8:]); number <= last {
			continue
		}
		if number, _, size := j.record(data[off:]); size > 0 {
			return nil, fmt.Errorf("read journal of task ledger: %w: behind record %d, %d bytes later, is record %d", ErrCorrupt,
				last, off-at, number)
		}
	}
	j.at, j.number = int64(at), last
	return changes, nil
}

// align is the number of bytes of which the length of every record is a multiple.
const align = 8

// record returns the record at the front of data. size is 0 if there is none that is whole.
//
//nolint:nonamedreturns // three results that are easily swapped
func (j *journal) record(data []byte) (number uint64, payload []byte, size int) {
	if len(data) < recordHead {
		return 0, nil, 0
	}
	length := int(binary.BigEndian.Uint32(data))
	if length == 0 || length > len(data)-recordHead {
		return 0, nil, 0
	}
	number, payload = binary.BigEndian.Uint64(data[8:]), data[recordHead:recordHead+length]
	if binary.BigEndian.Uint32(data[4:]) != j.sum(number, payload) {
		return 0, nil, 0
	}
	return number, payload, aligned(recordHead + length)
}

func aligned(n int) int { return (n + align - 1) / align * align }

// sum returns the checksum of a record. It covers the journal's id, so that a record of another journal is not valid,
// and the number, so that one of an earlier round is not valid in this place.
func (j *journal) sum(number uint64, payload []byte) uint32 {
	sum := crc32.Update(0, castagnoli, []byte(j.id))
	sum = crc32.Update(sum, castagnoli, binary.BigEndian.AppendUint64(nil, number))
	return crc32.Update(sum, castagnoli, payload)
}

// fits reports whether there is room for a record with a payload of n bytes.
func (j *journal) fits(n int) bool {
	return !j.failed && j.at+int64(aligned(recordHead+n)) <= journalSize
}

// append writes the next record. It returns once that is on disk.
func (j *journal) append(payload []byte) error {
	j.number++
	out := make([]byte, aligned(recordHead+len(payload)))
	binary.BigEndian.PutUint32(out, uint32(len(payload))) // it fits in the file
	binary.BigEndian.PutUint32(out[4:], j.sum(j.number, payload))
	binary.BigEndian.PutUint64(out[8:], j.number)
	copy(out[recordHead:], payload)
	if _, err := j.file.WriteAt(out, j.at); err != nil {
		j.failed = true
		return fmt.Errorf("write journal: %w", err)
	}
	j.at += int64(len(out))
	return nil
}

// begin sets the place of the next record to the front of the file. The tables must have all records so far.
func (j *journal) begin() { j.at, j.failed = headerSize, false }

// change is a new value of a key in a table, or its removal: then value is nil.
type change struct {
	slot  slot
	value []byte
}

// slot is the table and the key of a value.
type slot struct {
	table table
	key   string
}

func appendChange(out []byte, at slot, value []byte) []byte {
	out = append(out, byte(at.table))
	out = append(binary.AppendUvarint(out, uint64(len(at.key))), at.key...)
	if value == nil {
		return append(out, 0)
	}
	out = append(out, 1)
	return append(binary.AppendUvarint(out, uint64(len(value))), value...)
}

func decodeChanges(in []byte) ([]change, error) {
	var out []change
	text := func() ([]byte, bool) {
		length, size := binary.Uvarint(in)
		if size <= 0 || length > uint64(len(in)-size) {
			return nil, false
		}
		value := in[size : size+int(length)] // at most the rest
		in = in[size+int(length):]           // at most the rest
		return value, true
	}
	for len(in) > 0 {
		c := change{slot: slot{table: table(in[0])}}
		in = in[1:]
		key, ok := text()
		if !ok || c.slot.table.bucket() == nil || len(in) == 0 || in[0] > 1 {
			return nil, errRecord
		}
		c.slot.key = string(key)
		there := in[0] == 1
		in = in[1:]
		if there {
			if c.value, ok = text(); !ok {
				return nil, errRecord
			}
		}
		out = append(out, c)
	}
	return out, nil
}
