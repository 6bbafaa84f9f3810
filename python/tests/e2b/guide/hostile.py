"""What nobody wants to run at home: it never ends, it wants 80 GB, it removes all it can."""

LOOP = "n = 0\nwhile True: n += 1"
HOARD = "import numpy\nhoard = numpy.zeros(10 ** 10)\nhoard += 1"
REMOVE = "import subprocess\nsubprocess.run(['rm', '-rf', '/'])"
