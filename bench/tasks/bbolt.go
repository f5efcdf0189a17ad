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
)

// bboltRate returns how many commits a second the ledgers' files allow: many files, one durable commit after the other
// in each.
func bboltRate(dir string, files int, length time.Duration) (float64, error) {
	dir, err := os.MkdirTemp(dir, "bbolt-*")
	if err != nil {
		return 0, fmt.Errorf("make directory: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	var done atomic.Int64
	var wg sync.WaitGroup
	errs := make(chan error, 2*files)
	ready := make(chan struct{})
	var open sync.WaitGroup
	var until time.Time
	for i := range files {
		open.Add(1)
		wg.Go(func() {
			db, err := bbolt.Open(filepath.Join(dir, fmt.Sprintf("%d.db", i)), 0o600,
				&bbolt.Options{NoFreelistSync: true, FreelistType: bbolt.FreelistMapType})
			open.Done()
			if err != nil {
				errs <- err
				return
			}
			<-ready
			for n := uint64(0); time.Now().Before(until); n++ {
				err := db.Update(func(tx *bbolt.Tx) error {
					b, err := tx.CreateBucketIfNotExists([]byte("b"))
					if err != nil {
						return err
					}
					return b.Put(binary.BigEndian.AppendUint64(nil, n), make([]byte, 400))
				})
				if err != nil {
					errs <- err
					break
				}
				done.Add(1)
			}
			if err := db.Close(); err != nil {
				errs <- err
			}
		})
	}
	open.Wait()
	began := time.Now()
	until = began.Add(length)
	close(ready)
	wg.Wait()
	close(errs)
	var all []error
	for err := range errs {
		all = append(all, err)
	}
	if err := errors.Join(all...); err != nil {
		return 0, fmt.Errorf("measure bbolt: %w", err)
	}
	return float64(done.Load()) / time.Since(began).Seconds(), nil
}
