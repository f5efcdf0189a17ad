package testkit

import (
	"os"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// Terminal opens a terminal of 80 columns and returns both of its sides: the side of a person's screen and keyboard,
// and the side of a program's standard files. Queries of the terminal get no answer. Reads of the person's side end
// with an error once all holders of the other have closed it. The caller may close either; the test closes both.
func Terminal(tb testing.TB) (*os.File, *os.File) {
	tb.Helper()
	person, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		tb.Fatal(err)
	}
	fd := int(person.Fd()) // a descriptor fits an int
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		tb.Fatal(err)
	}
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		tb.Fatal(err)
	}
	program, err := os.OpenFile("/dev/pts/"+strconv.Itoa(number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		tb.Fatal(err)
	}
	if err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: 80}); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		_ = program.Close() // the test may have closed it
		_ = person.Close()  // as above
	})
	return person, program
}
