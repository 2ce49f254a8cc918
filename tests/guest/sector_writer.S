# A guest of 512 bytes that does nothing but write: sector after sector of its IDE disk, each with its own number, as fast as
# the disk takes them. It keeps in its memory how far it is, so that disk and memory can be held against each other.
#
#   physical memory                       what is there
#   0x0000_6000                           the counter (u32, little endian): the last sector that the disk has confirmed
#   0x0010_0000 .. 0x0110_0000 (16 MiB)   the mirror: a page for each of the last 4096 sectors, which begins with its number
#
# Sector N (from 1 on, sector 0 is this one) is 128 times the dword N. It is written, then confirmed by the disk, then noted in
# the mirror (page N mod 4096), then in the counter. So the disk is at the counter or one further, and so is the mirror.
#
# It says "ready" once, "BROKEN" when the disk refuses a sector, and "full" when the disk ends.

        .set    COUNTER,        0x6000
        .set    BUFFER,         0x6200
        .set    MIRROR,         0x100000
        .set    DISK_SECTORS,   0x200000        # as many as the laboratory makes the disk long: 1 GiB

        .set    FAST_A20,       0x92
        .set    ATA_DATA,       0x1f0
        .set    ATA_COUNT,      0x1f2           # then 0x1f3..0x1f5 LBA, 0x1f6 drive, 0x1f7 command and status
        .set    SERIAL_DATA,    0x3f8
        .set    SERIAL_STATUS,  0x3fd

        .intel_syntax noprefix
        .code16
        .globl  _start
_start:
        cli
        xor     ax, ax
        mov     ds, ax
        in      al, FAST_A20
        or      al, 2
        out     FAST_A20, al
        lgdt    [gdt_pointer]
        mov     eax, cr0
        or      al, 1
        mov     cr0, eax
        ljmp    0x08, offset protected_mode

        .code32
protected_mode:
        mov     ax, 0x10
        mov     ds, ax
        mov     es, ax
        mov     ss, ax
        mov     esp, 0x7c00
        cld
        mov     dword ptr [COUNTER], 0
        mov     esi, offset ready
        call    print

next:
        mov     ebx, [COUNTER]
        inc     ebx
        mov     esi, offset full
        cmp     ebx, DISK_SECTORS
        jae     say_and_end
        mov     edi, BUFFER
        mov     eax, ebx
        mov     ecx, 128
        rep     stosd

        mov     edx, ATA_COUNT
        mov     al, 1
        out     dx, al
        inc     edx
        mov     eax, ebx
        out     dx, al
        inc     edx
        shr     eax, 8
        out     dx, al
        inc     edx
        shr     eax, 8
        out     dx, al
        inc     edx
        mov     al, 0xe0                        # first drive, by LBA
        out     dx, al
        inc     edx
        mov     al, 0x30                        # write sectors
        out     dx, al
wait_for_request:
        in      al, dx
        and     al, 0x88                        # busy, data request
        cmp     al, 0x08
        jne     wait_for_request
        push    edx
        mov     edx, ATA_DATA
        mov     esi, BUFFER
        mov     ecx, 256
        rep     outsw
        pop     edx
wait_for_disk:
        in      al, dx
        test    al, 0x80
        jnz     wait_for_disk
        mov     esi, offset broken
        test    al, 0x21                        # error, write fault
        jnz     say_and_end

        mov     eax, ebx
        and     eax, 0xfff
        shl     eax, 12
        mov     [eax + MIRROR], ebx
        mov     [COUNTER], ebx
        jmp     next

say_and_end:
        call    print
end:
        hlt
        jmp     end

print:
        lodsb
        test    al, al
        jz      printed
        push    eax
        mov     edx, SERIAL_STATUS
wait_for_serial:
        in      al, dx
        test    al, 0x20
        jz      wait_for_serial
        pop     eax
        mov     edx, SERIAL_DATA
        out     dx, al
        jmp     print
printed:
        ret

ready:  .asciz  "ready\n"
broken: .asciz  "BROKEN\n"
full:   .asciz  "full\n"

        .balign 8
gdt:
        .quad   0
        .quad   0x00cf9a000000ffff              # code: flat 4 GiB
        .quad   0x00cf92000000ffff              # data: flat 4 GiB
gdt_pointer:
        .word   gdt_pointer - gdt - 1
        .long   gdt

        .org    510
        .word   0xaa55
