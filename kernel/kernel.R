# The R kernel: runs cells in the global environment and tells what they gave.
#
# R has neither JSON nor a way to use a socket that it inherits. So it reads orders from a pipe at descriptor 3 and writes words
# to one at descriptor 4: a letter, a length of four bytes, as many bytes. The agent, which translates, knows the same letters.
# Output goes through descriptors 1 and 2, which somebody else reads.
#
# Nothing here is found in the global environment: cells may define what they like.
local({
  most <- 8 * 2^20 # bytes of one word

  # --- the pipes -----------------------------------------------------------------------------------------------------

  pipes <- list()

  # Closed with all the others, by a cell, they are still there to be opened.
  pipe <- function(number, mode) {
    name <- paste0("/proc/self/fd/", number)
    open <- !is.null(pipes[[name]]) && tryCatch(isOpen(pipes[[name]]), error = function(e) FALSE)
    if (!open) pipes[[name]] <<- file(name, mode, raw = TRUE)
    pipes[[name]]
  }

  hear <- function() {
    head <- readBin(pipe(3, "rb"), "raw", 5)
    if (length(head) < 5) quit("no", 0, FALSE) # nobody asks any more
    size <- sum(as.integer(head[2:5]) * 256^(3:0))
    text <- rawToChar(readBin(pipe(3, "rb"), "raw", size))
    Encoding(text) <- "UTF-8"
    list(kind = rawToChar(head[1]), text = text)
  }

  # Not interrupted half way.
  tell <- function(kind, bytes = raw(0)) suspendInterrupts({
    if (is.character(bytes)) bytes <- charToRaw(enc2utf8(bytes))
    if (length(bytes) > most) {
      if (kind == "P") kind <- "V"
      bytes <- charToRaw(sprintf("<result left out: %.0f bytes, over the limit of %.0f for one event>", length(bytes), most))
    }
    to <- pipe(4, "wb")
    writeBin(c(charToRaw(kind), as.raw(length(bytes) %/% 256^(3:0) %% 256), bytes), to)
    flush(to)
  })

  # --- values --------------------------------------------------------------------------------------------------------

  # What the console would print, by the methods that the global environment has.
  printed <- function(value) {
    to <- rawConnection(raw(0), "wb")
    sink(to)
    on.exit({
      sink()
      close(to)
    })
    here <- list2env(list(value = value), parent = globalenv())
    if (isS4(value)) eval(quote(methods::show(value)), here) else eval(quote(print(value)), here)
    sub("\n$", "", rawToChar(rawConnectionValue(to)))
  }

  show <- function(value, last) {
    text <- printed(value)
    if (nzchar(text)) tell(if (last) "M" else "V", text)
  }

  pages <- tempfile("pages-")
  devices <- 0

  # What is drawn without a device of its own goes to files that the end of the cell shows. The options are those of notebooks.
  draw <- function(...) {
    devices <<- devices + 1
    dir.create(pages, showWarnings = FALSE)
    grDevices::png(
      sprintf("%s/%06d-%%03d.png", pages, devices),
      width = getOption("repr.plot.width", 7), height = getOption("repr.plot.height", 7), units = "in",
      res = getOption("repr.plot.res", 120), type = "cairo"
    )
    drawing <<- c(drawing, grDevices::dev.cur())
  }
  drawing <- integer()

  showPages <- function() {
    if (length(drawing) == 0) return()
    for (device in intersect(drawing, grDevices::dev.list())) grDevices::dev.off(device)
    drawing <<- integer()
    for (page in sort(list.files(pages, full.names = TRUE))) {
      tell("P", readBin(page, "raw", file.size(page)))
      unlink(page)
    }
  }

  # --- errors --------------------------------------------------------------------------------------------------------

  line <- function(call) substr(paste(deparse(call, width.cutoff = 200, nlines = 1)[1]), 1, 2000)

  ours <- quote(eval(cell[[at]], globalenv()))

  # The call that a condition comes from; none for what the cell itself does.
  callOf <- function(condition) {
    call <- conditionCall(condition)
    if (!identical(call, ours)) call
  }

  warned <- function(w) {
    level <- getOption("warn")
    if (level >= 2) return() # it becomes an error
    call <- callOf(w)
    said <- paste0(if (!is.null(call)) paste0("In ", line(call), " : "), conditionMessage(w))
    if (level >= 0) suspendInterrupts(cat("Warning message:\n", said, "\n", file = stderr(), sep = ""))
    invokeRestart("muffleWarning")
  }

  # The calls of a cell, without ours before them and the handler's after them.
  stackOf <- function(calls) {
    first <- 0
    for (i in seq_along(calls)) if (identical(calls[[i]], ours)) first <- i
    calls <- calls[seq_along(calls) > first]
    if (length(calls) > 0) calls <- calls[-length(calls)]
    handler <- function(call) is.call(call) && identical(call[[1]], quote(.handleSimpleError))
    calls <- Filter(function(call) !handler(call), calls)
    if (length(calls) > 100) calls <- c(calls[1:50], calls[length(calls) - 49:0])
    vapply(seq_along(calls), function(i) paste0(i, ": ", line(calls[[i]])), "")
  }

  describe <- function(e, calls) {
    value <- paste(conditionMessage(e), collapse = "\n")
    value <- iconv(value, "UTF-8", "UTF-8", sub = "?") # bytes that are no text can neither be cut nor told
    if (nchar(value, "bytes") > 2^20) value <- substr(value, 1, 10000)
    call <- callOf(e)
    first <- if (is.null(call)) paste0("Error: ", value) else paste0("Error in ", line(call), " : ", value)
    c(class(e)[1], value, first, stackOf(calls))
  }

  tellError <- function(words) {
    fields <- lapply(words, function(word) c(charToRaw(enc2utf8(word)), as.raw(0)))
    tell("E", unlist(fields))
  }

  # --- cells ---------------------------------------------------------------------------------------------------------

  evaluate <- function(code, silent) {
    cell <- parse(text = code, keep.source = TRUE, encoding = "UTF-8")
    for (at in seq_along(cell)) {
      value <- withVisible(eval(cell[[at]], globalenv()))
      if (value$visible && !silent) show(value$value, at == length(cell))
    }
  }

  run <- function(code, silent) {
    outcome <- "ok"
    calls <- failure <- NULL
    fail <- function(how, words) {
      outcome <<- how
      failure <<- words
    }
    tryCatch(
      withRestarts(
        withCallingHandlers(
          allowInterrupts(evaluate(code, silent)),
          warning = warned, error = function(e) calls <<- sys.calls()
        ),
        abort = function() fail("error", c("abort", "the cell went to the top level", "Error: the cell went to the top level"))
      ),
      interrupt = function(e) fail("interrupted", c("KeyboardInterrupt", "the cell was interrupted", "KeyboardInterrupt: the cell was interrupted")),
      error = function(e) fail("error", tryCatch(describe(e, calls), error = function(again) {
        c(class(e)[1], "an error that cannot be described", "Error: it cannot be described")
      }))
    )
    tryCatch(showPages(), error = function(e) cat("kernel: a plot is not shown: ", conditionMessage(e), "\n", file = stderr(), sep = ""))
    if (!is.null(failure)) tellError(failure)
    outcome
  }

  # Enters a cell's environment and directory; the function that leaves them.
  enter <- function(env, cwd) {
    old <- Sys.getenv(names(env), unset = NA, names = TRUE)
    if (length(env) > 0) do.call(Sys.setenv, as.list(env))
    before <- NULL
    if (nzchar(cwd)) {
      tryCatch(before <- setwd(cwd), error = function(e) cat(cwd, ": ", conditionMessage(e), "\n", file = stderr(), sep = ""))
    }
    function() {
      if (length(env) > 0) {
        Sys.unsetenv(names(old)[is.na(old)])
        if (!all(is.na(old))) do.call(Sys.setenv, as.list(old[!is.na(old)]))
      }
      if (!is.null(before)) try(setwd(before), silent = TRUE) # it may be gone
    }
  }

  peak <- function() {
    status <- tryCatch(readLines("/proc/self/status"), error = function(e) character())
    sub("[^0-9]*([0-9]+).*", "\\1", c(grep("^VmHWM:", status, value = TRUE), "0")[1])
  }

  spent <- function() sum(proc.time()[c("user.self", "sys.self")])

  # What comes before the code of a cell is about it.
  cells <- function() {
    env <- character()
    cwd <- ""
    silent <- FALSE
    repeat {
      order <- hear()
      switch(order$kind,
        N = env[[order$text]] <- "",
        V = env[[length(env)]] <- order$text,
        C = cwd <- order$text,
        S = silent <- TRUE,
        X = {
          tryCatch(allowInterrupts(Sys.sleep(0)), interrupt = function(e) NULL) # one that came after the cell that it was for
          before <- spent()
          leave <- enter(env, cwd)
          tell("B")
          outcome <- run(order$text, silent)
          leave()
          tell("D", paste(outcome, format(1000 * (spent() - before), scientific = FALSE), peak()))
          env <- character()
          cwd <- ""
          silent <- FALSE
        }
      )
    }
  }

  if (capabilities("png") && capabilities("cairo")) options(device = draw)
  suspendInterrupts({
    tell("R", paste(R.version$major, R.version$minor, sep = "."))
    cells()
  })
}, envir = new.env(parent = baseenv()))
