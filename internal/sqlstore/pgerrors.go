package sqlstore

import (
	"context"
	"database/sql/driver"
	"errors"
	"io"
	"net"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/covehq/cove/internal/fault"
)

// States of Postgres, by the SQL standard's codes and its own.
const (
	stateUnique        = "23505"
	stateSerialization = "40001"
	stateDeadlock      = "40P01"
	stateDiskFull      = "53100"
	stateLockTimeout   = "55P03"
	stateReadOnly      = "25006"
	stateIdleInTx      = "25P03"
	stateNoDatabase    = "3D000"
	stateNoPrivilege   = "42501"
	stateNoSchema      = "3F000"
)

// sqlState is Postgres's code of an error, or empty.
func sqlState(err error) string {
	var e *pgconn.PgError
	if !errors.As(err, &e) {
		return ""
	}
	return e.Code
}

// inWords says what a caller can do about a failure of Postgres. What it wraps has no values of rows: those are in details that
// pgconn leaves out of the text.
func inWords(err error) error {
	var said *fault.Error
	if err == nil || errors.As(err, &said) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	state := sqlState(err)
	switch class := state[:min(2, len(state))]; {
	case state == stateDiskFull:
		return fault.Wrap(fault.DiskFull, err, "the database's disk is full: nothing can be recorded")
	case state == stateReadOnly:
		return fault.Wrap(fault.Unavailable, err, "the database takes no changes at the moment: try again later")
	case state == stateLockTimeout:
		return fault.Wrap(fault.Unavailable, err, "the database is busy: try again")
	case class == "53", class == "57", class == "58", class == "28", state == stateNoDatabase, lost(err):
		return fault.Wrap(fault.Unavailable, err, "the database does not answer: try again later")
	}
	return err
}

// lost tells the end of a connection from other errors.
func lost(err error) bool {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return false // it was closed since its caller left
	}
	if state := sqlState(err); state != "" {
		return strings.HasPrefix(state, "08") || strings.HasPrefix(state, "57P") || state == stateIdleInTx
	}
	var connect *pgconn.ConnectError
	var network net.Error
	return errors.As(err, &connect) || errors.As(err, &network) || errors.Is(err, net.ErrClosed) || errors.Is(err, driver.ErrBadConn) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || pgconn.SafeToRetry(err)
}

// busy is the end of a transaction that others were in the way of, again and again.
func busy(err error) error {
	return fault.Wrap(fault.Unavailable, err, "the database is busy: try again")
}

// unopened says what an operator can do about a database that does not open.
func unopened(err error) error {
	state := sqlState(err)
	switch {
	case state == stateNoDatabase:
		return fault.Wrap(fault.Invalid, err, "Postgres has no such database: make it with CREATE DATABASE, or correct its name in database.url")
	case strings.HasPrefix(state, "28"):
		return fault.Wrap(fault.Denied, err, "Postgres refuses the user or the password of database.url")
	case state == stateNoPrivilege, state == stateNoSchema:
		return fault.Wrap(fault.Denied, err, "the user of database.url may not make tables: make it the owner of the database, or GRANT CREATE ON SCHEMA public to it")
	case fault.Is(err, fault.Unavailable):
		return fault.Wrap(fault.Unavailable, err, "Postgres does not answer: see whether it runs, and whether the host and port of database.url are right")
	}
	return err
}
