package tasks

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/bbolt"
	"golang.org/x/sync/errgroup"
)

// bboltConfig is the configuration of a measurement of bbolt.
type bboltConfig struct {
	Dir    string
	Files  int
	Length time.Duration
}

// bboltRate returns how many commits a second the ledgers' files allow: many files, one durable commit after the other
// in each.
func bboltRate(cfg bboltConfig) (float64, error) {
	dir, err := os.MkdirTemp(cfg.Dir, "bbolt-*")
	if err != nil {
		return 0, fmt.Errorf("make directory: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	var done atomic.Int64
	var group errgroup.Group
	ready := make(chan struct{})
	var open sync.WaitGroup
	var until time.Time
	for i := range cfg.Files {
		open.Add(1)
		group.Go(func() error {
			db, err := bbolt.Open(filepath.Join(dir, fmt.Sprintf("%d.db", i)), 0o600,
				&bbolt.Options{NoFreelistSync: true, FreelistType: bbolt.FreelistMapType})
			open.Done()
			if err != nil {
				return err
			}
			<-ready
			for n := uint64(0); err == nil && time.Now().Before(until); n++ {
				err = db.Update(func(tx *bbolt.Tx) error {
					b, err := tx.CreateBucketIfNotExists([]byte("b"))
					if err != nil {
						return err
					}
					return b.Put(binary.BigEndian.AppendUint64(nil, n), make([]byte, 400))
				})
				if err == nil {
					done.Add(1)
				}
			}
			return errors.Join(err, db.Close())
		})
	}
	open.Wait()
	began := time.Now()
	until = began.Add(cfg.Length)
	close(ready)
	if err := group.Wait(); err != nil {
		return 0, fmt.Errorf("measure bbolt: %w", err)
	}
	return float64(done.Load()) / time.Since(began).Seconds(), nil
}
