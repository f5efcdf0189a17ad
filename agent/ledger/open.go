package ledger

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/google/uuid"
	"go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"

	"github.com/gpuaas/mesh/internal/pki"
)

// ErrCorrupt is in the error of Open if the file exists and cannot be read whole. The file is left as it is.
var ErrCorrupt = errors.New("the task ledger is corrupt")

// ErrInUse is in the error of Open if another process has the file open.
var ErrInUse = errors.New("the task ledger is in use by another process")

const (
	// format is the format that builds without journals read: the tables have everything.
	format = "gpuaas-ledger-1"
	// formatJournal means that the tables lack the changes in the journal.
	formatJournal = "gpuaas-ledger-2"
)

var (
	bucketMeta   = []byte("meta")
	bucketTasks  = []byte("tasks")
	bucketFences = []byte("fences")
	// bucketForeign has the attempts that were signed for another node. It is made with the first one.
	bucketForeign = []byte("foreign")
	keyFormat     = []byte("format")
	keyLedgerID   = []byte("ledger_id")
	keyNodeID     = []byte("node_id")
	keyJournal    = []byte("journal") // the journal's id
	keyApplied    = []byte("applied") // the number of the last of its records that the tables have
)

func options() *bbolt.Options {
	return &bbolt.Options{
		Timeout: time.Second,
		// The free list is rebuilt by reading the pages, so that commits write less. Every commit is synced; growth too,
		// which ext4 needs.
		NoFreelistSync:  true,
		FreelistType:    bbolt.FreelistMapType,
		InitialMmapSize: 16 << 20,
		NoStatistics:    true,
	}
}

// opened is an open file, with the name and node of a file that was moved aside for it.
type opened struct {
	store *store
	moved string
	whose string // the node that the moved file belongs to; empty if it was corrupt
}

// openFile opens the ledger's file, or makes it if there is none. A new file gets its name only when it is whole, so
// that a crash while making one leaves nothing that looks like a damaged ledger.
func openFile(path, nodeID string, moveAside bool) (opened, error) {
	// What a crash, or a disk that was full, left while a new file was made.
	if err := os.Remove(path + building); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return opened{}, fmt.Errorf("remove unfinished task ledger: %w", err)
	}
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if err := create(path); err != nil {
			return opened{}, err
		}
	case err != nil:
		return opened{}, fmt.Errorf("find task ledger: %w", err)
	case !info.Mode().IsRegular():
		return opened{}, fmt.Errorf("open task ledger: %s is not a regular file", path)
	}
	whole, owner, err := openWhole(path, nodeID)
	if err == nil && owner != "" {
		o, err := replace(path, fmt.Sprintf("%s.of-node-%s-%d", path, owner, time.Now().UnixNano()))
		o.whose = owner
		return o, err
	}
	if err == nil {
		return opened{store: whole}, nil
	}
	if !moveAside || !errors.Is(err, ErrCorrupt) {
		return opened{}, err
	}
	return replace(path, fmt.Sprintf("%s.corrupt-%d", path, time.Now().UnixNano()))
}

// replace moves the file and its journal to names that give the cause, and begins a new one. A crash between the two
// leaves no file, and the next Open makes one.
func replace(path, moved string) (opened, error) {
	if err := os.Rename(path, moved); err != nil {
		return opened{}, fmt.Errorf("move task ledger aside: %w", err)
	}
	if err := os.Rename(path+journalEnding, moved+journalEnding); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return opened{}, fmt.Errorf("move journal of task ledger aside: %w", err)
	}
	if err := create(path); err != nil {
		return opened{}, err
	}
	whole, _, err := openWhole(path, "")
	return opened{store: whole, moved: moved}, err
}

// bind makes the file the node's own if it belongs to no node yet.
func (o opened) bind(nodeID string) error {
	f, err := readFacts(o.store.db)
	if err == nil && f.node == "" {
		err = o.store.tables(func(tx *bbolt.Tx) error { return tx.Bucket(bucketMeta).Put(keyNodeID, []byte(nodeID)) })
	}
	if err != nil {
		return errors.Join(fmt.Errorf("bind task ledger to node %s: %w", nodeID, err), o.store.close())
	}
	return nil
}

// building is the ending under which a new file is made.
const building = ".new"

func create(path string) error {
	db, err := bbolt.Open(path+building, 0o600, options())
	if err != nil {
		return fmt.Errorf("create task ledger: %w", err)
	}
	id, err := uuid.NewRandom()
	if err != nil {
		return errors.Join(fmt.Errorf("draw ledger id: %w", err), db.Close())
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		for _, name := range [][]byte{bucketMeta, bucketTasks, bucketFences} {
			if _, err := tx.CreateBucket(name); err != nil {
				return err
			}
		}
		meta := tx.Bucket(bucketMeta)
		if err := meta.Put(keyFormat, []byte(format)); err != nil {
			return err
		}
		return meta.Put(keyLedgerID, []byte(id.String()))
	})
	if err := errors.Join(err, db.Close()); err != nil {
		return fmt.Errorf("write new task ledger: %w", err)
	}
	if err := os.Rename(path+building, path); err != nil {
		return fmt.Errorf("name new task ledger: %w", err)
	}
	return pki.SyncDir(filepath.Dir(path))
}

// openWhole reads the file, then opens it. Damage causes an error, a panic of the page reader, or a fault on mapped
// pages beyond the end of a file that was cut; in this goroutine all three become ErrCorrupt. The file is first opened
// for reading only, because bbolt, when it opens a file to write, reads the free pages in a goroutine of its own, where
// a panic would end the process. When openWhole returns, the tables have the changes of the journal. If the file is
// another node's than nodeID, which is empty for any, its owner is returned and nothing is opened.
func openWhole(path, nodeID string) (*store, string, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, "", fmt.Errorf("find task ledger: %w", err)
	}
	if info.Size() == 0 {
		return nil, "", fmt.Errorf("open %s: %w: the file is empty", path, ErrCorrupt)
	}
	if err := inspect(path, info.Size()); err != nil {
		return nil, "", err
	}
	db, err := openDB(path, options())
	if err != nil {
		return nil, "", err
	}
	f, err := readFacts(db)
	if err == nil && nodeID != "" && f.node != "" && f.node != nodeID {
		if f.format == format { // the journal has nothing that the tables lack
			if err := os.Remove(path + journalEnding); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return nil, "", errors.Join(fmt.Errorf("remove journal of another node's task ledger: %w", err), db.Close())
			}
		}
		return nil, f.node, db.Close()
	}
	var whole *store
	if err == nil {
		whole, err = openStore(path, db)
	}
	if err != nil {
		return nil, "", errors.Join(err, db.Close())
	}
	return whole, "", nil
}

func inspect(path string, size int64) error {
	readOnly := options()
	readOnly.ReadOnly = true
	db, err := openDB(path, readOnly)
	if err != nil {
		return err
	}
	if err := errors.Join(guarded(func() error { return check(db, size) }), db.Close()); err != nil {
		return fmt.Errorf("open %s: %w: %w", path, ErrCorrupt, err)
	}
	return nil
}

func openDB(path string, opts *bbolt.Options) (*bbolt.DB, error) {
	var db *bbolt.DB
	err := guarded(func() error {
		var err error
		db, err = bbolt.Open(path, 0o600, opts)
		return err
	})
	switch {
	case err == nil:
		return db, nil
	case errors.Is(err, berrors.ErrTimeout):
		return nil, fmt.Errorf("open %s: %w", path, ErrInUse)
	}
	// such an error is no evidence that the file is corrupt
	if _, ok := errors.AsType[syscall.Errno](err); ok || errors.Is(err, fs.ErrPermission) {
		return nil, fmt.Errorf("open task ledger: %w", err)
	}
	return nil, fmt.Errorf("open %s: %w: %w", path, ErrCorrupt, err)
}

// guarded calls f and returns a panic or a fault on mapped memory as an error.
func guarded(f func() error) (err error) { // a recovered panic becomes the error
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("read pages: %v", r)
		}
	}()
	return f()
}

// check reads every entry of every table.
func check(db *bbolt.DB, size int64) error {
	tx, err := db.Begin(false)
	if err != nil {
		return err
	}
	err = guarded(func() error { return checkTx(tx, size) })
	return errors.Join(err, tx.Rollback())
}

func checkTx(tx *bbolt.Tx, size int64) error {
	if size < tx.Size() {
		return fmt.Errorf("the file has %d bytes of %d", size, tx.Size())
	}
	meta, tasks, fences := tx.Bucket(bucketMeta), tx.Bucket(bucketTasks), tx.Bucket(bucketFences)
	if meta == nil || tasks == nil || fences == nil {
		return errors.New("a table is missing")
	}
	if got := string(meta.Get(keyFormat)); got != format && got != formatJournal {
		return fmt.Errorf("format %q is neither %q nor %q", got, format, formatJournal)
	}
	if _, err := uuid.ParseBytes(meta.Get(keyLedgerID)); err != nil {
		return fmt.Errorf("ledger id: %w", err)
	}
	if node := meta.Get(keyNodeID); node != nil {
		if _, err := uuid.ParseBytes(node); err != nil {
			return fmt.Errorf("node id: %w", err)
		}
	}
	err := tasks.ForEach(func(key, value []byte) error {
		e, err := decode(value)
		if err == nil && !bytes.Equal(e.Key.bytes(), key) {
			err = errEntry
		}
		if err != nil {
			return fmt.Errorf("task %q: %w", key, err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return fences.ForEach(func(key, value []byte) error {
		if len(value) != fenceSize {
			return fmt.Errorf("fence of %q: %w", key, errEntry)
		}
		return nil
	})
}
